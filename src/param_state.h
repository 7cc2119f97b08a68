#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <muon/optimizer.h>

namespace muon::detail {

/// The name of a group's parameter, or its place where it has none.
std::string param_label(const MuonOptions& options, std::size_t group, std::size_t index);

/// "group 0" or "group 0, first parameter head.weight": who an option error is about.
std::string group_label(const MuonOptions& options, std::size_t group);

/// What the group's algorithm keeps for a parameter of that shape.
std::vector<StateTensor> state_slots(
    const MuonOptions& options, const at::Tensor& param, std::string_view name);

/// A zero tensor for a slot: in the dtype of `state_dtype`, else of the
/// gradient; float32 for statistics; a step count lives on the CPU.
at::Tensor create_state(
    const StateTensor& slot, const at::Tensor& param, const MuonOptions& options);

/// Drops what the slots do not name or what has another shape, and moves the
/// rest to where the parameter lives now.
void fit_state(
    MuonParamState& state, const std::vector<StateTensor>& slots, const at::Tensor& param);

/// Whether a parameter takes part in steps: frozen ones have no state.
bool takes_part(const at::Tensor& param);

} // namespace muon::detail
