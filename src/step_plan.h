#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <muon/algorithm.h>
#include <muon/step.h>

#include "matrix/region.h"
#include "orthogonalize/iteration.h"
#include "plan/plan.h"
#include "state/block_layout.h"

namespace muon::detail {

/// A batch of equal matrices of one parameter: what a plan::Item stands for.
struct MatrixItem {
  std::int64_t param = 0;
  Region region;
  double factor = 1.0; // shape factor of the learning rate
  std::int64_t ordinal = 0; // among its parameter's
  std::int64_t first_value = 0; // index of its first value among those of its ordinal
};

/// A slot of an algorithm and where its tensor is in a parameter's state; a
/// quantised one is followed by its scales.
struct SlotPlace {
  StateSlot::Kind kind = StateSlot::Kind::LikeParam;
  std::size_t position = 0;
  bool is_quantized = false;
};

/// What a parameter that is stored in bfloat16 and stepped in float32 needs, by
/// position in its state; neither: it is rounded to the nearest.
struct RoundingPlace {
  std::optional<std::size_t> remainder;
  std::optional<std::size_t> step; // stochastic rounding
};

/// Elementwise parameters of one algorithm and spec, in parameter order.
struct ElementwiseRun {
  const Algorithm* algorithm = nullptr;
  std::string spec;
  std::vector<std::int64_t> params;
};

/// Everything a step needs to know about its parameters, apart from tensors.
struct StepPlan {
  std::vector<std::string> names;
  std::vector<std::vector<std::int64_t>> sizes; // of each parameter
  std::vector<std::int64_t> groups; // row of hyper
  std::vector<GroupSpec> specs;
  std::vector<std::string> spec_texts;
  std::vector<const Algorithm*> algorithms; // of each group
  std::vector<std::size_t> first_state; // of each parameter in the flat state
  std::vector<std::vector<SlotPlace>> slots; // of each group
  std::vector<std::vector<StateTensor>> state; // of each parameter
  std::vector<std::optional<BlockLayout>> blocks; // of each parameter with quantised state
  std::vector<RoundingPlace> rounding; // of each parameter
  std::vector<MatrixItem> items; // parallel to plan.items
  plan::Plan plan;
  std::vector<ElementwiseRun> elementwise;
  std::int64_t hyper_width = Hyper::kCount; // columns of hyper
  bool on_cpu = true;

  const GroupSpec& spec_of(std::int64_t param) const {
    return specs[static_cast<std::size_t>(groups[static_cast<std::size_t>(param)])];
  }
  const Algorithm& algorithm_of(std::int64_t param) const {
    return *algorithms[static_cast<std::size_t>(groups[static_cast<std::size_t>(param)])];
  }
  const std::string& spec_text_of(std::int64_t param) const {
    return spec_texts[static_cast<std::size_t>(groups[static_cast<std::size_t>(param)])];
  }
  const std::vector<SlotPlace>& slots_of(std::int64_t param) const {
    return slots[static_cast<std::size_t>(groups[static_cast<std::size_t>(param)])];
  }
  /// Null where the state is plain.
  const BlockLayout* blocks_of(std::int64_t param) const {
    const auto& layout = blocks[static_cast<std::size_t>(param)];
    return layout ? &*layout : nullptr;
  }
  const RoundingPlace& rounding_of(std::int64_t param) const {
    return rounding[static_cast<std::size_t>(param)];
  }
};

/// The plan of a handle; ValueError for a handle that was freed or never made.
std::shared_ptr<const StepPlan> find_plan(PlanHandle handle);

/// The slots that a spec's algorithm keeps, amsgrad's included, in the order of
/// its state.
std::vector<SlotPlace> slot_places(const GroupSpec& spec);

} // namespace muon::detail
