#pragma once
#include <optional>

#include <ATen/core/ivalue.h>
#include <ATen/core/List.h>
#include <ATen/core/stack.h>

namespace fsdp::tensor {

/// Calls fn(tensor, argument index, index within a list or -1) for each defined tensor among the top `count` values
/// of `stack`, those inside lists too. fn returns true if it assigned another tensor, which then goes into its place;
/// lists are copied first, never written through.
template <class Fn>
void map_tensors(torch::jit::Stack* stack, size_t count, Fn&& fn) {
  const size_t base = stack->size() - count;
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = (*stack)[base + i];
    const int argument = static_cast<int>(i);
    if (value.isTensor()) {
      if (!value.toTensor().defined()) continue;
      at::Tensor tensor = value.toTensor();
      if (fn(tensor, argument, -1)) value = std::move(tensor);
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      bool changed = false;
      for (size_t k = 0; k < list.size(); ++k) {
        if (list[k].defined()) changed |= fn(list[k], argument, static_cast<int>(k));
      }
      if (changed) value = c10::List<at::Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      bool changed = false;
      int k = 0;
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor() && item.toTensor().defined()) {
          at::Tensor tensor = item.toTensor();
          changed |= fn(tensor, argument, k);
          list.push_back(std::move(tensor));
        } else {
          list.push_back(std::nullopt);
        }
        ++k;
      }
      if (changed) value = std::move(list);
    }
  }
}

/// Calls fn(tensor, argument index) for each defined tensor, and copies nothing.
template <class Fn>
void visit_tensors(const torch::jit::Stack& stack, size_t count, Fn&& fn) {
  const size_t base = stack.size() - count;
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = stack[base + i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) fn(value.toTensor(), i);
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor() && item.toTensor().defined()) fn(item.toTensor(), i);
      }
    }
  }
}

}  // namespace fsdp::tensor
