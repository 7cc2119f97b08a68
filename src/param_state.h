#pragma once

#include <map>
#include <string>
#include <string_view>
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

/// The state that `options` would have created, filled from `saved`, which another
/// run may have kept in another dtype, format or place. ValueError naming the
/// parameter where something is missing or does not fit.
std::map<std::string, at::Tensor> adapt_state(
    const std::map<std::string, at::Tensor>& saved, const at::Tensor& param,
    const MuonOptions& options, std::string_view name);

/// The same for the state of this run after its groups have changed: what fits
/// is kept as it is, what has another shape or no slot is dropped.
void fit_state(
    MuonParamState& state, const at::Tensor& param, const MuonOptions& options,
    std::string_view name);

/// Whether a parameter takes part in steps: frozen ones have no state.
bool takes_part(const at::Tensor& param);

} // namespace muon::detail
