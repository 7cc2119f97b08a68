// Every op of libmuon: schemas first, then what implements them.
// The op arguments are documented with the functions of <muon/step.h> and
// <muon/algorithm.h> that they call.
#include <map>
#include <mutex>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <muon/algorithm.h>
#include <muon/kernels/device.h>
#include <muon/orthogonalize.h>
#include <muon/qk_clip.h>
#include <muon/step.h>
#include <muon/version.h>

#include "algorithm/stages.h"
#include "functional.h"
#include "state/convert.h"
#include "state/file.h"

TORCH_LIBRARY(muon, m) {
  m.def("version() -> str");
  m.def("build_info() -> str");

  // The functional core.
  m.def("orthogonalize(Tensor x, str spec, float eps) -> Tensor");
  m.def("gram(Tensor x) -> Tensor");
  m.def(
      "qk_clip_(Tensor(a!) query, Tensor(b!) key, Tensor logits, float threshold, int num_key_heads, "
      "float balance, int dim) -> Tensor");
  m.def(
      "step_(int plan, Tensor(a!)[] params, Tensor?[] grads, Tensor(b!)[] state, Tensor hyper, *, "
      "Tensor? grad_scale=None, Tensor? found_inf=None, Tensor(c!)? skipped=None) -> ()");
  m.def(
      "muon_(Tensor(a!)[] params, Tensor?[] grads, Tensor(b!)[] momentum_buffers, Tensor hyper, str spec) -> ()");

  // Files of named tensors and texts (src/state/file.h).
  m.def("write_state_file(str path, str[] names, Tensor[] tensors, Dict(str, str) metadata) -> ()");
  m.def(
      "read_state_file(str path, bool needs_checksum) -> (str[] names, Tensor[] tensors, Dict(str, str) metadata)");

  // Plans and what a shell asks about them.
  m.def("create_plan(Tensor[] params, int[] groups, str[] specs, str[] names) -> int");
  m.def("free_plan(int plan) -> ()");
  m.def("explain_plan(int plan) -> str");
  m.def("workspace_bytes(int plan) -> int");
  // Each text of state_layout is "name kind sizes": kind is "param" (the parameter's strides, dtype by
  // `state_dtype`), "statistic", "step" or a dtype; sizes by commas, "-" for a 0-d tensor. matrix_shapes is (batch, rows, cols)
  // a block, schedule_coefficients (a, b, c) a step.
  m.def("state_layout(str spec, int[] sizes, ScalarType dtype, str name) -> str[]");
  // Whole parameters of `sizes` between float32 values and what the spec's state_format stores.
  m.def("encode_state(Tensor values, str spec, str name) -> (Tensor codes, Tensor scales)");
  m.def(
      "decode_state(Tensor codes, Tensor scales, str spec, int[] sizes, bool is_complex, str name) -> Tensor");
  m.def("matrix_shapes(str spec, int[] sizes, str name) -> int[]");
  m.def("shape_factors(str spec, int[] sizes, str name) -> float[]");
  m.def("schedule_names() -> str[]");
  m.def("schedule_coefficients(str spec) -> float[]");
  m.def("registered_algorithms() -> str[]");
  m.def("is_elementwise(str algorithm) -> bool");
  m.def("algorithm_options(str algorithm) -> Dict(str, float)");
  // Python's way to `register_algorithm`: state as "name kind" with kind param, row or step; stages as
  // "stage=op", those left out are libmuon's own.
  m.def(
      "register_algorithm(str name, str[] state, str[] stages, str[] options, float[] values, bool replace) -> ()");

  // Stages of the algorithms (contract: <muon/algorithm.h>).
  m.def(
      "accumulate_(Tensor[] grads, Tensor(a!)[] state, Tensor(b!)[] matrices, Tensor hyper, int[] groups, "
      "Tensor? grad_scale) -> ()");
  m.def("orthogonalize_(Tensor(a!) matrices, Tensor hyper, int[] groups, str spec) -> ()");
  m.def("normuon_(Tensor(a!)[] matrices, Tensor(b!)[] state, Tensor hyper, int[] groups) -> ()");
  m.def(
      "apply_(Tensor(a!)[] params, Tensor[] matrices, Tensor hyper, int[] groups, float[] factors) -> ()");
  m.def(
      "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, Tensor hyper, int[] groups, "
      "Tensor? grad_scale, str spec) -> ()");
}

namespace muon {
namespace {

using c10::List;
using Tensors = const List<std::optional<at::Tensor>>&;

std::vector<at::Tensor> or_undefined(Tensors optional) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(optional.size());
  for (const std::optional<at::Tensor>& tensor : optional) {
    tensors.push_back(tensor.value_or(at::Tensor()));
  }
  return tensors;
}

void step_op(
    std::int64_t plan, at::TensorList params, Tensors grads, at::TensorList state,
    const at::Tensor& hyper, const std::optional<at::Tensor>& grad_scale,
    const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& skipped) {
  step_(
      plan, params, or_undefined(grads), state, hyper, grad_scale.value_or(at::Tensor()),
      found_inf.value_or(at::Tensor()), skipped.value_or(at::Tensor()));
}

void muon_op(
    at::TensorList params, Tensors grads, at::TensorList momentum_buffers, const at::Tensor& hyper,
    std::string_view spec) {
  muon_(params, or_undefined(grads), momentum_buffers, hyper, spec);
}

at::Tensor orthogonalize_op(const at::Tensor& x, std::string_view spec_text, double eps) {
  GroupSpec spec = parse_group_spec(spec_text);
  spec.orthogonalize.eps = eps;
  return spec.layout == MatrixLayout{} ? orthogonalize(x, spec.orthogonalize)
                                       : orthogonalize(x, spec.orthogonalize, spec.layout);
}

at::Tensor orthogonalize_meta(const at::Tensor& x, std::string_view, double) {
  return at::empty_like(x);
}

at::Tensor gram_meta(const at::Tensor& x) {
  at::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = sizes[sizes.size() - 2];
  return at::empty_symint(sizes, x.options());
}

at::Tensor qk_clip_op(
    at::Tensor query, at::Tensor key, const at::Tensor& logits, double threshold,
    std::int64_t num_key_heads, double balance, std::int64_t dim) {
  return qk_clip_(
      std::move(query), std::move(key), logits, {threshold, num_key_heads, balance, dim});
}

at::Tensor qk_clip_meta(
    at::Tensor query, at::Tensor key, const at::Tensor& logits, double, std::int64_t, double,
    std::int64_t) {
  for (const at::Tensor& tensor : {std::move(query), std::move(key), logits}) {
    TORCH_CHECK_VALUE(
        tensor.is_meta(),
        "muon: expected query, key and logits with data, or none with, got one on ",
        tensor.device());
  }
  const std::int64_t head_dim = logits.dim() == 1 ? 0 : logits.dim() - 3;
  return at::empty_symint({logits.sym_size(head_dim)}, logits.options().dtype(at::kFloat));
}

std::vector<GroupSpec> parse_all(const std::vector<std::string>& texts) {
  std::vector<GroupSpec> specs;
  for (const std::string& text : texts) {
    specs.push_back(parse_group_spec(text));
  }
  return specs;
}

using Texts = c10::Dict<std::string, std::string>;

void write_state_file_op(
    std::string_view path, const std::vector<std::string>& names, at::TensorList tensors,
    const Texts& metadata) {
  TORCH_CHECK_VALUE(
      names.size() == tensors.size(), "muon: expected a name for each of ", tensors.size(),
      " tensors, got ", names.size());
  detail::StateFile file;
  for (const auto& entry : metadata) {
    file.metadata[entry.key()] = entry.value();
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    file.tensors.emplace_back(names[i], tensors[i]);
  }
  detail::write_state_file(std::string(path), file);
}

std::tuple<std::vector<std::string>, std::vector<at::Tensor>, Texts> read_state_file_op(
    std::string_view path, bool needs_checksum) {
  detail::StateFile file = detail::read_state_file(
      std::string(path), needs_checksum ? detail::Checksum::Required : detail::Checksum::Optional);
  std::tuple<std::vector<std::string>, std::vector<at::Tensor>, Texts> result;
  for (auto& [name, tensor] : file.tensors) {
    std::get<0>(result).push_back(name);
    std::get<1>(result).push_back(std::move(tensor));
  }
  for (const auto& [key, text] : file.metadata) {
    std::get<2>(result).insert(key, text);
  }
  return result;
}

std::int64_t create_plan_op(
    at::TensorList params, at::IntArrayRef groups, const std::vector<std::string>& specs,
    const std::vector<std::string>& names) {
  return create_plan(params, groups, parse_all(specs), names);
}

std::string kind_text(const StateTensor& state) {
  switch (state.kind) {
    case StateTensor::Kind::LikeParam:
      return "param";
    case StateTensor::Kind::Statistic:
      return "statistic";
    case StateTensor::Kind::Step:
      return "step";
    case StateTensor::Kind::Fixed:
      break;
  }
  return std::string(c10::getDtypeNames(state.dtype).first);
}

std::vector<std::string> state_layout_op(
    std::string_view spec, at::IntArrayRef sizes, at::ScalarType dtype, std::string_view name) {
  std::vector<std::string> texts;
  for (const StateTensor& state : state_layout(parse_group_spec(spec), sizes, dtype, name)) {
    const std::string dims = state.sizes.empty() ? "-" : c10::Join(",", state.sizes);
    texts.push_back(c10::str(state.name, ' ', kind_text(state), ' ', dims));
  }
  return texts;
}

std::tuple<at::Tensor, at::Tensor> encode_state_op(
    const at::Tensor& values, std::string_view spec, std::string_view name) {
  auto [codes, scales] = detail::encode_values(values, parse_group_spec(spec), name);
  return {std::move(codes), std::move(scales)};
}

at::Tensor decode_state_op(
    const at::Tensor& codes, const at::Tensor& scales, std::string_view spec, at::IntArrayRef sizes,
    bool is_complex, std::string_view name) {
  return detail::decode_values(codes, scales, sizes, is_complex, parse_group_spec(spec), name);
}

std::vector<std::int64_t> matrix_shapes_op(
    std::string_view spec, at::IntArrayRef sizes, std::string_view name) {
  std::vector<std::int64_t> flat;
  for (const MatrixShape& shape : matrix_shapes(sizes, parse_group_spec(spec).layout, name)) {
    flat.insert(flat.end(), {shape.batch, shape.rows, shape.cols});
  }
  return flat;
}

std::vector<double> shape_factors_op(
    std::string_view spec_text, at::IntArrayRef sizes, std::string_view name) {
  const GroupSpec spec = parse_group_spec(spec_text);
  std::vector<double> factors;
  for (const MatrixShape& shape : matrix_shapes(sizes, spec.layout, name)) {
    factors.push_back(shape_factor(spec.adjust_lr, shape.rows, shape.cols));
  }
  return factors;
}

std::vector<double> schedule_coefficients_op(std::string_view spec_text) {
  const OrthogonalizeOptions options = parse_group_spec(spec_text).orthogonalize;
  std::vector<double> flat;
  for (const Coefficients& row : options.schedule.take(options.steps)) {
    flat.insert(flat.end(), row.begin(), row.end());
  }
  return flat;
}

std::string version_op() {
  return MUON_VERSION;
}

std::string build_info_op() {
  return kernels::build_description();
}

StateSlot parse_slot(const std::string& text) {
  const std::size_t space = text.rfind(' ');
  const std::string kind = space == std::string::npos ? "" : text.substr(space + 1);
  TORCH_CHECK_VALUE(
      kind == "param" || kind == "row" || kind == "step",
      "muon: expected a state slot \"name kind\" with kind param, row or step, got \"", text, "\"");
  return {
      text.substr(0, space),
      kind == "param"     ? StateSlot::Kind::LikeParam
          : kind == "row" ? StateSlot::Kind::PerRow
                          : StateSlot::Kind::Step};
}

void set_stage(Algorithm& algorithm, const std::string& text) {
  const std::map<std::string_view, std::string*> stages = {
      {"accumulate", &algorithm.accumulate}, {"orthogonalize", &algorithm.orthogonalize},
      {"refine", &algorithm.refine},         {"apply", &algorithm.apply},
      {"update", &algorithm.update},         {"matrix_update", &algorithm.matrix_update}};
  const std::size_t equals = text.find('=');
  const auto stage = stages.find(std::string_view(text).substr(0, equals));
  TORCH_CHECK_VALUE(
      equals != std::string::npos && stage != stages.end(), "muon: expected stage=op, got \"", text,
      "\"");
  *stage->second = text.substr(equals + 1);
}

void register_algorithm_op(
    std::string_view name, const std::vector<std::string>& state,
    const std::vector<std::string>& stages, const std::vector<std::string>& options,
    const std::vector<double>& values, bool replace) {
  TORCH_CHECK_VALUE(
      options.size() == values.size(), "muon: expected a value for each option, got ",
      values.size(), " for ", options.size());
  Algorithm algorithm;
  algorithm.name = name;
  for (const std::string& text : state) {
    algorithm.state.push_back(parse_slot(text));
  }
  for (const std::string& text : stages) {
    set_stage(algorithm, text);
  }
  for (std::size_t i = 0; i < options.size(); ++i) {
    algorithm.options.push_back({options[i], values[i]});
  }
  register_algorithm(std::move(algorithm), replace);
}

c10::Dict<std::string, double> algorithm_options_op(std::string_view algorithm) {
  c10::Dict<std::string, double> options;
  for (const AlgorithmOption& option : find_algorithm(algorithm).options) {
    options.insert(option.name, option.value);
  }
  return options;
}

bool is_elementwise_op(std::string_view algorithm) {
  return find_algorithm(algorithm).is_elementwise();
}

void register_device(torch::Library& m) {
  m.impl("orthogonalize", &orthogonalize_op);
  m.impl("gram", &gram);
  m.impl("qk_clip_", &qk_clip_op);
  m.impl("step_", &step_op);
  m.impl("muon_", &muon_op);
  m.impl("accumulate_", &detail::accumulate_);
  m.impl("orthogonalize_", &detail::orthogonalize_stage_);
  m.impl("normuon_", &detail::normuon_);
  m.impl("apply_", &detail::apply_);
  m.impl("adam_", &detail::adam_);
}

} // namespace

TORCH_LIBRARY_IMPL(muon, CPU, m) {
  register_device(m);
}

TORCH_LIBRARY_IMPL(muon, CUDA, m) {
  register_device(m);
}

TORCH_LIBRARY_IMPL(muon, Meta, m) {
  m.impl("orthogonalize", &orthogonalize_meta);
  m.impl("gram", &gram_meta);
  m.impl("qk_clip_", &qk_clip_meta);
}

// One implementation whatever the device, also where there are no tensors among the arguments.
TORCH_LIBRARY_IMPL(muon, CompositeExplicitAutograd, m) {
  m.impl("write_state_file", &write_state_file_op);
  m.impl("read_state_file", &read_state_file_op);
  m.impl("version", &version_op);
  m.impl("build_info", &build_info_op);
  m.impl("create_plan", &create_plan_op);
  m.impl("free_plan", &free_plan);
  m.impl("explain_plan", &explain_plan);
  m.impl("workspace_bytes", &workspace_bytes);
  m.impl("state_layout", &state_layout_op);
  m.impl("encode_state", &encode_state_op);
  m.impl("decode_state", &decode_state_op);
  m.impl("matrix_shapes", &matrix_shapes_op);
  m.impl("shape_factors", &shape_factors_op);
  m.impl("schedule_names", &schedule_names);
  m.impl("schedule_coefficients", &schedule_coefficients_op);
  m.impl("registered_algorithms", &registered_algorithms);
  m.impl("is_elementwise", &is_elementwise_op);
  m.impl("algorithm_options", &algorithm_options_op);
  m.impl("register_algorithm", &register_algorithm_op);
}

} // namespace muon
