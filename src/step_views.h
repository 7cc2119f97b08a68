#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "state/block_layout.h"
#include "step_plan.h"

/// What one step works on: its tensors, and the views of them that the stages see.
namespace muon::detail {

class StateStreams;

/// The tensors of one step beside its plan.
struct Step {
  const StepPlan& plan;
  at::TensorList params;
  const std::vector<at::Tensor>& grads; // undefined: none in this step
  at::TensorList state;
  const at::Tensor& hyper;
  std::optional<at::Tensor> grad_scale;
  at::Tensor skipped; // int64 a parameter, or undefined
  StateStreams& offload;

  const at::Tensor& param(std::int64_t i) const {
    return params[static_cast<std::size_t>(i)];
  }
  const at::Tensor& grad(std::int64_t i) const {
    return grads[static_cast<std::size_t>(i)];
  }
  /// The tensor at a position of the parameter's state layout.
  const at::Tensor& state_of(std::int64_t i, std::size_t position) const {
    return state[plan.first_state[static_cast<std::size_t>(i)] + position];
  }
  const std::string& name(std::int64_t i) const {
    return plan.names[static_cast<std::size_t>(i)];
  }
  std::int64_t group(std::int64_t i) const {
    return plan.groups[static_cast<std::size_t>(i)];
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

bool is_finite(const at::Tensor& tensor);

/// Adds one to what counts a parameter's steps.
void count_step(const Step& step, std::int64_t param);

/// Matrices first .. first + count of an item, with a gradient in this step.
struct ActivePiece {
  const MatrixItem* item;
  std::int64_t first;
  std::int64_t count;
};

/// One state slot of a piece: a plain tensor [batch, rows..., cols..., (2)],
/// [batch, rows, 1] or 0-d, or codes and scales.
struct StateView {
  at::Tensor plain;
  BlockState blocks;

  bool is_quantized() const {
    return blocks.format != StateFormat::Plain;
  }
};

/// What the stages see of a chunk: one entry a piece.
struct ChunkViews {
  std::vector<at::Tensor> params, grads; // [batch, rows..., cols..., (2)], real
  std::vector<StateView> state; // every slot of a piece
  std::vector<StateView> remainders; // of a split parameter's piece; else undefined
  std::vector<std::int64_t> groups;
  std::vector<double> factors;

  /// Slots first .. last of every piece.
  std::vector<StateView> slots(std::size_t first, std::size_t last) const;
};

ChunkViews make_views(const Step& step, const std::vector<ActivePiece>& active);

/// The matrices of a chunk between ACCUMULATE and APPLY.
struct Workspace {
  at::Tensor all; // [count, rows, cols]
  std::vector<at::Tensor> pieces; // [batch, rows, cols]
  std::vector<at::Tensor> real; // the same in the shapes of ChunkViews::params
  std::vector<std::int64_t> groups; // one a matrix
};

Workspace make_workspace(
    const Step& step, const std::vector<ActivePiece>& active, const ChunkViews& views);

/// State as libmuon's own stages take it: plain tensors, or codes and scales.
std::vector<at::Tensor> stored_state(const std::vector<StateView>& views);

/// `tensors` (one a piece, as ChunkViews::params) in the order in which the
/// blocks of quantised pieces lie; as they are where nothing is quantised.
std::vector<at::Tensor> in_block_order(
    const Step& step, const std::vector<ActivePiece>& active,
    const std::vector<at::Tensor>& tensors);

/// State as plain tensors while a stage that knows no codes works on it.
class PlainState {
 public:
  PlainState(
      const Step& step, const std::vector<ActivePiece>& active, std::vector<StateView> views);
  const std::vector<at::Tensor>& tensors() const {
    return tensors_;
  }
  void store() const;

 private:
  std::vector<StateView> views_;
  std::vector<at::Tensor> tensors_; // as ChunkViews::params
  std::vector<at::Tensor> decoded_; // the same in block order, where quantised
};

/// Parameters as float32 while a stage works on them, where they are bfloat16
/// and their group rounds stochastically or keeps a remainder.
class WideParams {
 public:
  WideParams(const Step& step, const std::vector<ActivePiece>& active, const ChunkViews& views);
  const std::vector<at::Tensor>& tensors() const {
    return tensors_;
  }
  void store() const;

 private:
  void store_one(std::size_t piece) const;

  const Step& step_;
  const std::vector<ActivePiece>& active_;
  const ChunkViews& views_;
  std::vector<at::Tensor> tensors_;
};

} // namespace muon::detail
