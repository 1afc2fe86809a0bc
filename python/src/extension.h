#pragma once
#include <vector>

#include <torch/csrc/utils/pybind.h>

#include "engine/extension.h"
#include "shown_param.h"

namespace fsdp::python {

/// An extension whose work is done by a Python object (_extension.py): send(local), receive(local, received) and
/// release().
class PyExtension final : public engine::Extension {
 public:
  PyExtension(const ShownParam& param, py::object impl) : param_(param), impl_(std::move(impl)) {}
  ~PyExtension() override;
  std::vector<at::Tensor> send() override;
  void receive(const std::vector<at::Tensor>& received) override;
  void release() noexcept override;

 private:
  const ShownParam& param_;  // lives longer than the engine's parameter, which owns this
  py::object impl_;
};

}  // namespace fsdp::python
