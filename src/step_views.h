#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "step_plan.h"

/// What one step works on: its tensors, and the views of them that the stages see.
namespace muon::detail {

/// The tensors of one step beside its plan.
struct Step {
  const StepPlan& plan;
  at::TensorList params;
  const std::vector<at::Tensor>& grads; // undefined: none in this step
  at::TensorList state;
  const at::Tensor& hyper;
  std::optional<at::Tensor> grad_scale;
  at::Tensor skipped; // int64 a parameter, or undefined

  const at::Tensor& param(std::int64_t i) const {
    return params[static_cast<std::size_t>(i)];
  }
  const at::Tensor& grad(std::int64_t i) const {
    return grads[static_cast<std::size_t>(i)];
  }
  const at::Tensor& state_of(std::int64_t i, std::int64_t slot) const {
    return state[static_cast<std::size_t>(plan.first_state[static_cast<std::size_t>(i)] + slot)];
  }
  bool skips_nonfinite(std::int64_t i) const {
    return plan.spec_of(i).nonfinite == NonFinite::Skip;
  }
  void count_skipped(std::int64_t i, std::int64_t matrices) const {
    if (skipped.defined()) {
      skipped.select(0, i).add_(matrices);
    }
  }
};

/// A piece of a chunk with a gradient in this step.
struct ActivePiece {
  const MatrixItem* item;
  std::int64_t first;
  std::int64_t count;
};

/// What the stages see of a chunk: one entry a piece.
struct ChunkViews {
  std::vector<at::Tensor> params, grads; // [batch, rows..., cols..., (2)], real
  std::vector<at::Tensor> state; // every slot of a piece: as above, [batch, rows, 1] or 0-d
  std::vector<std::int64_t> groups;
  std::vector<double> factors;
};

ChunkViews make_views(const Step& step, const std::vector<ActivePiece>& active);

/// Slots first .. last of every piece, of `slots` that each has.
std::vector<at::Tensor> select_slots(
    const ChunkViews& views, std::size_t slots, std::size_t first, std::size_t last);

/// The matrices of a chunk between ACCUMULATE and APPLY.
struct Workspace {
  at::Tensor all; // [count, rows, cols]
  std::vector<at::Tensor> pieces; // [batch, rows, cols]
  std::vector<at::Tensor> real; // the same in the shapes of ChunkViews::params
  std::vector<std::int64_t> groups; // one a matrix
};

Workspace make_workspace(
    const Step& step, const std::vector<ActivePiece>& active, const ChunkViews& views);

} // namespace muon::detail
