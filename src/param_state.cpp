#include "param_state.h"

#include <set>
#include <tuple>
#include <utility>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include "state/convert.h"

namespace muon {

MuonParamState::MuonParamState(const at::Tensor& param) : param_(param.getIntrusivePtr()) {}

at::Tensor MuonParamState::get(const std::string& key) const {
  const auto found = tensors_.find(key);
  return found == tensors_.end() ? at::Tensor() : found->second;
}

void MuonParamState::serialize(torch::serialize::InputArchive& archive) {
  tensors_.clear();
  for (const std::string& key : archive.keys()) {
    archive.read(key, tensors_[key], /*is_buffer=*/true);
  }
}

void MuonParamState::serialize(torch::serialize::OutputArchive& archive) const {
  for (const auto& [key, tensor] : tensors_) {
    if (tensor.defined()) {
      archive.write(key, tensor, /*is_buffer=*/true);
    }
  }
}

namespace detail {
namespace {

// Not every supported torch lets a parameter say which dtype its gradients have.
template <typename Param>
c10::ScalarType gradient_dtype(const Param& param) {
  if (param.grad().defined()) {
    return param.grad().scalar_type();
  }
  if constexpr (requires { param.grad_dtype(); }) {
    return param.grad_dtype().value_or(param.scalar_type());
  } else {
    return param.scalar_type();
  }
}

// A step count lives on the CPU, everything else with the parameter unless it is offloaded.
c10::Device slot_device(
    const StateTensor& slot, const at::Tensor& param, const MuonOptions& options) {
  const bool is_host = slot.kind == StateTensor::Kind::Step || options.offload();
  return is_host ? c10::Device(c10::kCPU) : param.device();
}

// Host memory that a GPU reads and writes without a stop.
at::TensorOptions slot_memory(
    const StateTensor& slot, const at::Tensor& param, const MuonOptions& options) {
  const bool is_pinned =
      options.offload() && param.is_cuda() && slot.kind != StateTensor::Kind::Step;
  return at::TensorOptions(slot_device(slot, param, options)).pinned_memory(is_pinned);
}

} // namespace

std::string param_label(const MuonOptions& options, std::size_t group, std::size_t index) {
  return index < options.param_names().size() ? options.param_names()[index]
                                              : c10::str("parameter ", index, " of group ", group);
}

std::string group_label(const MuonOptions& options, std::size_t group) {
  return options.param_names().empty()
      ? c10::str("group ", group)
      : c10::str("group ", group, ", first parameter ", options.param_names().front());
}

std::vector<StateTensor> state_slots(
    const MuonOptions& options, const at::Tensor& param, std::string_view name) {
  return state_layout(options.spec(), param.sizes(), param.scalar_type(), name);
}

at::Tensor create_state(
    const StateTensor& slot, const at::Tensor& param, const MuonOptions& options) {
  const auto zeros = [&](c10::ScalarType dtype) {
    return at::zeros(slot.sizes, slot_memory(slot, param, options).dtype(dtype));
  };
  switch (slot.kind) {
    case StateTensor::Kind::LikeParam: {
      const auto asked = options.state_dtype();
      const c10::ScalarType dtype = !asked ? gradient_dtype(param)
          : param.is_complex()             ? c10::toComplexType(*asked)
                                           : *asked;
      return at::zeros_like(param, slot_memory(slot, param, options).dtype(dtype));
    }
    case StateTensor::Kind::Statistic: // no narrower than its parameter
      return zeros(c10::promoteTypes(c10::kFloat, c10::toRealValueType(param.scalar_type())));
    case StateTensor::Kind::Step:
      return zeros(c10::kFloat);
    case StateTensor::Kind::Fixed:
      break;
  }
  return zeros(slot.dtype);
}

namespace {

using Tensors = std::map<std::string, at::Tensor>;

at::Tensor find(const Tensors& tensors, const std::string& key) {
  const auto found = tensors.find(key);
  return found == tensors.end() ? at::Tensor() : found->second;
}

// A momentum or moment as plain values, whichever format it was kept in.
at::Tensor plain_values(
    const Tensors& saved, const std::string& key, const at::Tensor& param, const GroupSpec& spec,
    std::string_view name) {
  const at::Tensor tensor = find(saved, key);
  TORCH_CHECK_VALUE(tensor.defined(), "muon: the saved state has no ", key, " for ", name);
  const at::Tensor scales = find(saved, scale_key(key));
  const at::Tensor values = scales.defined()
      ? decode_values(tensor, scales, param.sizes(), param.is_complex(), spec, name)
      : tensor;
  TORCH_CHECK_VALUE(
      values.sizes() == param.sizes() && values.is_complex() == param.is_complex() &&
          (values.is_floating_point() || values.is_complex()),
      "muon: expected ", key, " of shape ", param.sizes(), " for ", name, ", got ",
      values.scalar_type(), " ", values.sizes(), " in the saved state");
  return values;
}

// Codes of the same format are taken over bit by bit.
void adapt_codes(
    Tensors& result, const Tensors& saved, const StateTensor& slot, const StateTensor& scale_slot,
    const at::Tensor& param, const MuonOptions& options, std::string_view name) {
  const auto fits = [](const at::Tensor& tensor, const StateTensor& expected) {
    return tensor.defined() && tensor.scalar_type() == expected.dtype &&
        tensor.sizes() == at::IntArrayRef(expected.sizes);
  };
  at::Tensor codes = find(saved, slot.name);
  at::Tensor scales = find(saved, scale_slot.name);
  if (!fits(codes, slot) || !fits(scales, scale_slot)) {
    const GroupSpec spec = options.spec();
    const at::Tensor values = plain_values(saved, slot.name, param, spec, name);
    std::tie(codes, scales) = encode_values(values, spec, name);
  }
  result[slot.name] = create_state(slot, param, options).copy_(codes);
  result[scale_slot.name] = create_state(scale_slot, param, options).copy_(scales);
}

at::Tensor adapted(
    const Tensors& saved, const StateTensor& slot, const at::Tensor& param,
    const MuonOptions& options, std::string_view name) {
  at::Tensor target = create_state(slot, param, options);
  if (slot.kind == StateTensor::Kind::LikeParam) {
    return target.copy_(plain_values(saved, slot.name, param, options.spec(), name));
  }
  const at::Tensor source = find(saved, slot.name);
  if (!source.defined() && slot.is_optional) {
    return target;
  }
  TORCH_CHECK_VALUE(source.defined(), "muon: the saved state has no ", slot.name, " for ", name);
  TORCH_CHECK_VALUE(
      source.sizes() == target.sizes() && source.is_complex() == target.is_complex() &&
          (slot.kind != StateTensor::Kind::Fixed || source.scalar_type() == slot.dtype),
      "muon: expected ", slot.name, " as ", target.scalar_type(), " ", target.sizes(), " for ",
      name, ", got ", source.scalar_type(), " ", source.sizes(), " in the saved state");
  return target.copy_(source);
}

// Another run's remainder and count of roundings may go; anything else is a mistake.
void check_known(
    const Tensors& saved, const std::vector<StateTensor>& slots, const MuonOptions& options,
    std::string_view name) {
  std::set<std::string> known{kRemainder, "step"};
  for (const StateTensor& slot : slots) {
    known.insert({slot.name, scale_key(slot.name)});
  }
  for (const auto& [key, tensor] : saved) {
    TORCH_CHECK_VALUE(
        known.contains(key), "muon: the saved state has \"", key, "\" for ", name,
        ", which algorithm \"", options.algorithm(), "\" does not keep with these options");
  }
}

bool is_codes(const std::vector<StateTensor>& slots, std::size_t i) {
  return i + 1 < slots.size() && slots[i + 1].name == scale_key(slots[i].name);
}

} // namespace

Tensors adapt_state(
    const Tensors& saved, const at::Tensor& param, const MuonOptions& options,
    std::string_view name) {
  const std::vector<StateTensor> slots = state_slots(options, param, name);
  check_known(saved, slots, options, name);
  Tensors result;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (is_codes(slots, i)) {
      adapt_codes(result, saved, slots[i], slots[i + 1], param, options, name);
      ++i;
    } else {
      result[slots[i].name] = adapted(saved, slots[i], param, options, name);
    }
  }
  return result;
}

namespace {

// The tensor itself where it is in place, else a copy there.
at::Tensor create_at(
    const StateTensor& slot, const at::Tensor& param, const MuonOptions& options,
    const at::Tensor& tensor) {
  return tensor.device() == slot_device(slot, param, options)
      ? tensor
      : at::empty_like(tensor, slot_memory(slot, param, options).dtype(tensor.scalar_type()))
            .copy_(tensor);
}

} // namespace

void fit_state(
    MuonParamState& state, const at::Tensor& param, const MuonOptions& options,
    std::string_view name) {
  const std::vector<StateTensor> slots = state_slots(options, param, name);
  const Tensors& saved = state.tensors();
  Tensors kept;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const StateTensor& slot = slots[i];
    const at::Tensor tensor = find(saved, slot.name);
    const bool was_codes = find(saved, scale_key(slot.name)).defined();
    if (!tensor.defined() ||
        (slot.kind != StateTensor::Kind::LikeParam && !is_codes(slots, i) &&
         tensor.sizes() != at::IntArrayRef(slot.sizes))) {
      continue;
    }
    if (is_codes(slots, i)) {
      if (was_codes || tensor.sizes() == param.sizes()) {
        adapt_codes(kept, saved, slot, slots[i + 1], param, options, name);
      }
      ++i;
    } else if (was_codes) {
      kept[slot.name] = adapted(saved, slot, param, options, name);
    } else if (tensor.sizes() == at::IntArrayRef(slot.sizes)) {
      kept[slot.name] = create_at(slot, param, options, tensor);
    }
  }
  state.tensors() = std::move(kept);
}

bool takes_part(const at::Tensor& param) {
  return param.requires_grad() || param.grad().defined();
}

} // namespace detail
} // namespace muon
