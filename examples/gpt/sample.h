#pragma once
#include <cstdint>
#include <string>

#include "options.h"
#include "sharding.h"

namespace gpt {

/// Continues the prompt by sample_bytes bytes. Collective: every rank runs the same forwards, since each of them
/// gathers parameters, and draws the same bytes from the same seed.
std::string sample(const Model& model, const Options& options);

/// The text with bytes that a terminal would not print as themselves shown as '.'.
std::string printable(const std::string& text);

}  // namespace gpt
