#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace muon::detail {

/// Walks tensors of one shape together, whatever their strides, as runs along
/// the dim that is innermost in memory for the first of them, or in the order
/// of their dims. Dims that are adjacent in all tensors are merged: equal dense
/// layouts are a single run.
enum class RunOrder : std::uint8_t { Memory, Dims };

template <std::size_t kTensors>
class StridedRuns {
 public:
  using Offsets = std::array<std::int64_t, kTensors>;

  explicit StridedRuns(
      const std::array<const at::Tensor*, kTensors>& tensors,
      RunOrder run_order = RunOrder::Memory) {
    const at::IntArrayRef sizes = tensors[0]->sizes();
    c10::SmallVector<std::size_t, kInlineDims> order;
    for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
      if (sizes[dim] != 1) {
        order.push_back(dim);
      }
    }
    if (run_order == RunOrder::Memory) {
      std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return tensors[0]->strides()[a] > tensors[0]->strides()[b];
      });
    }
    for (const std::size_t dim : order) {
      Offsets strides;
      for (std::size_t t = 0; t < kTensors; ++t) {
        strides[t] = tensors[t]->strides()[dim];
      }
      push(sizes[dim], strides);
    }
    if (sizes_.empty()) {
      push(tensors[0]->numel(), Offsets{});
    }
    numel_ = tensors[0]->numel();
  }

  std::int64_t numel() const {
    return numel_;
  }

  /// Strides of a run, one a tensor.
  const Offsets& run_strides() const {
    return strides_.back();
  }

  /// Calls `visit(offsets, length)` for the runs that make up the elements
  /// begin .. end of the walk, no run longer than `max_length`.
  template <typename Visit>
  void for_each(
      std::int64_t begin, std::int64_t end, std::int64_t max_length, Visit&& visit) const {
    const std::int64_t inner = sizes_.back();
    for (std::int64_t at = begin; at < end;) {
      const std::int64_t position = at % inner;
      const std::int64_t length = std::min({inner - position, end - at, max_length});
      Offsets offsets = outer_offsets(at / inner);
      for (std::size_t t = 0; t < kTensors; ++t) {
        offsets[t] += position * strides_.back()[t];
      }
      visit(offsets, length);
      at += length;
    }
  }

 private:
  static constexpr std::size_t kInlineDims = 4;

  // Appends an inner dim, merged with the previous one where all tensors allow.
  void push(std::int64_t size, const Offsets& strides) {
    if (!sizes_.empty()) {
      bool is_adjacent = true;
      for (std::size_t t = 0; t < kTensors; ++t) {
        is_adjacent = is_adjacent && strides_.back()[t] == strides[t] * size;
      }
      if (is_adjacent) {
        sizes_.back() *= size;
        strides_.back() = strides;
        return;
      }
    }
    sizes_.push_back(size);
    strides_.push_back(strides);
  }

  Offsets outer_offsets(std::int64_t outer) const {
    Offsets offsets{};
    for (std::size_t dim = sizes_.size() - 1; dim-- > 0;) {
      const std::int64_t index = outer % sizes_[dim];
      outer /= sizes_[dim];
      for (std::size_t t = 0; t < kTensors; ++t) {
        offsets[t] += index * strides_[dim][t];
      }
    }
    return offsets;
  }

  c10::SmallVector<std::int64_t, kInlineDims> sizes_;
  c10::SmallVector<Offsets, kInlineDims> strides_;
  std::int64_t numel_ = 0;
};

} // namespace muon::detail
