#pragma once
#include <stdexcept>
#include <string>

#include <fsdp/export.h>

/// The errors that libfsdp throws. Each message names the rank, the parameter or module, what was expected, what
/// was got and what to do about it. All derive from fsdp::Error, which is a std::runtime_error.
namespace fsdp {

class FSDP_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller passed something that can never work (ValueError in Python).
class FSDP_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The request is meaningful but this build or this tensor cannot do it (NotImplementedError in Python).
class FSDP_API NotSupported : public Error {
 public:
  using Error::Error;
};

/// A collective failed: a peer is gone, or the ranks do not do the same thing.
class FSDP_API CommError : public Error {
 public:
  using Error::Error;
};

/// A collective did not finish within the process group's timeout.
class FSDP_API TimeoutError : public CommError {
 public:
  using CommError::CommError;
};

/// A checkpoint is missing something, is damaged, or belongs to another model.
class FSDP_API CheckpointError : public Error {
 public:
  using Error::Error;
};

/// A promise inside libfsdp does not hold; please report it.
class FSDP_API InvariantError : public Error {
 public:
  using Error::Error;
};

}  // namespace fsdp
