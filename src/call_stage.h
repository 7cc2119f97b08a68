#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

/// How the executor calls stages; their contract is in <muon/algorithm.h>.
namespace muon::detail {

using OptionalTensor = std::optional<at::Tensor>;

// A stage is called through the dispatcher, wherever it is written.
template <typename Signature, typename... Args>
void call_stage(const std::string& op, Args&&... args) {
  c10::Dispatcher::singleton()
      .findSchemaOrThrow(op.c_str(), "")
      .typed<Signature>()
      .call(std::forward<Args>(args)...);
}

using Accumulate = void(
    at::TensorList, at::TensorList, at::TensorList, const at::Tensor&, at::IntArrayRef,
    const OptionalTensor&);
using Orthogonalize = void(at::Tensor, const at::Tensor&, at::IntArrayRef, std::string_view);
using Refine = void(at::TensorList, at::TensorList, const at::Tensor&, at::IntArrayRef);
using Apply =
    void(at::TensorList, at::TensorList, const at::Tensor&, at::IntArrayRef, at::ArrayRef<double>);
using MatrixUpdate = void(
    at::TensorList, at::TensorList, at::TensorList, const at::Tensor&, at::IntArrayRef,
    at::ArrayRef<double>, const OptionalTensor&, std::string_view);
using Elementwise = void(
    at::TensorList, at::TensorList, at::TensorList, const at::Tensor&, at::IntArrayRef,
    const OptionalTensor&, std::string_view);

} // namespace muon::detail
