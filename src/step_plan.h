#pragma once

#include <memory>
#include <string>
#include <vector>

#include <muon/algorithm.h>
#include <muon/step.h>

#include "matrix/region.h"
#include "orthogonalize/iteration.h"
#include "plan/plan.h"

namespace muon::detail {

/// A batch of equal matrices of one parameter: what a plan::Item stands for.
struct MatrixItem {
  std::int64_t param = 0;
  Region region;
  double factor = 1.0; // shape factor of the learning rate
  bool is_first = true; // of its parameter's
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
  std::vector<std::int64_t> first_state; // of each parameter in the flat state
  std::vector<std::vector<StateSlot>> slots; // of each group
  std::vector<std::vector<StateTensor>> state; // of each parameter
  std::vector<MatrixItem> items; // parallel to plan.items
  plan::Plan plan;
  std::vector<ElementwiseRun> elementwise;
  std::int64_t hyper_width = Hyper::kCount; // columns of hyper

  const GroupSpec& spec_of(std::int64_t param) const {
    return specs[static_cast<std::size_t>(groups[static_cast<std::size_t>(param)])];
  }
  const Algorithm& algorithm_of(std::int64_t param) const {
    return *algorithms[static_cast<std::size_t>(groups[static_cast<std::size_t>(param)])];
  }
  const std::vector<StateSlot>& slots_of(std::int64_t param) const {
    return slots[static_cast<std::size_t>(groups[static_cast<std::size_t>(param)])];
  }
};

/// The plan of a handle; ValueError for a handle that was freed or never made.
std::shared_ptr<const StepPlan> find_plan(PlanHandle handle);

/// The slots that a spec's algorithm keeps, amsgrad's included.
std::vector<StateSlot> state_slots(const Algorithm& algorithm, const GroupSpec& spec);

} // namespace muon::detail
