#include "step_plan.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include <c10/util/Exception.h>

#include "state/convert.h"

namespace muon {
namespace detail {
namespace {

// Workspace of one chunk: the cache on a CPU, enough to fill a GPU elsewhere.
constexpr std::int64_t kCpuChunkBytes = std::int64_t{8} * 1024 * 1024;
constexpr std::int64_t kDeviceChunkBytes = std::int64_t{256} * 1024 * 1024;

class PlanTable {
 public:
  static PlanTable& instance() {
    static PlanTable table;
    return table;
  }

  PlanHandle add(std::shared_ptr<const StepPlan> plan) {
    const std::lock_guard lock(mutex_);
    plans_.emplace(++last_, std::move(plan));
    return last_;
  }

  void remove(PlanHandle handle) {
    const std::lock_guard lock(mutex_);
    plans_.erase(handle);
  }

  std::shared_ptr<const StepPlan> find(PlanHandle handle) {
    const std::lock_guard lock(mutex_);
    const auto found = plans_.find(handle);
    return found == plans_.end() ? nullptr : found->second;
  }

 private:
  std::mutex mutex_;
  PlanHandle last_ = 0;
  std::map<PlanHandle, std::shared_ptr<const StepPlan>> plans_;
};

// Matrices share a chunk when everything that acts on a whole chunk is equal.
std::string chunk_kind(
    const at::Tensor& param, const GroupSpec& spec, const Iteration& iteration, bool is_complex) {
  GroupSpec shared;
  shared.algorithm = spec.algorithm;
  shared.orthogonalize = spec.orthogonalize;
  shared.batch_size = spec.batch_size;
  shared.state_format = spec.state_format;
  shared.offload = spec.offload;
  return c10::str(
      param.device(), ' ', workspace_dtype(iteration, is_complex), ' ', to_string(shared));
}

void check_param(const at::Tensor& param, const std::string& name) {
  TORCH_CHECK_TYPE(
      param.is_floating_point() || param.is_complex(),
      "muon: expected floating point or complex parameters, got ", param.scalar_type(), " (", name,
      ")");
  TORCH_CHECK_NOT_IMPLEMENTED(
      param.layout() == c10::kStrided, "muon: expected a dense parameter, got layout ",
      param.layout(), " (", name, ")");
}

void add_matrices(
    StepPlan& step_plan, std::vector<plan::Item>& items, std::int64_t index,
    const at::Tensor& param) {
  const GroupSpec& spec = step_plan.spec_of(index);
  const std::string& name = step_plan.names[static_cast<std::size_t>(index)];
  std::int64_t ordinal = 0;
  for (Region& region : resolve_regions(param.sizes(), param.is_complex(), spec.layout, name)) {
    const auto dtype =
        region.is_complex ? c10::toComplexType(param.scalar_type()) : param.scalar_type();
    const Iteration iteration = make_iteration(spec.orthogonalize, dtype);
    const MatrixShape shape = region.shape;
    const auto element =
        static_cast<std::int64_t>(c10::elementSize(workspace_dtype(iteration, region.is_complex)));
    items.push_back(
        {name, chunk_kind(param, spec, iteration, region.is_complex), shape.batch, shape.rows,
         shape.cols, shape.rows * shape.cols * element, spec.batch_size});
    step_plan.items.push_back(
        {index, std::move(region), shape_factor(spec.adjust_lr, shape.rows, shape.cols), ordinal++,
         0});
  }
}

void add_elementwise(StepPlan& step_plan, std::int64_t index) {
  const Algorithm* algorithm = &step_plan.algorithm_of(index);
  const std::string& spec =
      step_plan
          .spec_texts[static_cast<std::size_t>(step_plan.groups[static_cast<std::size_t>(index)])];
  for (ElementwiseRun& run : step_plan.elementwise) {
    if (run.algorithm == algorithm && run.spec == spec) {
      run.params.push_back(index);
      return;
    }
  }
  step_plan.elementwise.push_back({algorithm, spec, {index}});
}

// The slots of a spec's algorithm, amsgrad's included.
std::vector<StateSlot> state_slots(const GroupSpec& spec) {
  const Algorithm& algorithm = find_algorithm(spec.algorithm);
  std::vector<StateSlot> slots = algorithm.state;
  if (spec.amsgrad && algorithm.is_elementwise()) {
    slots.push_back({"max_exp_avg_sq", StateSlot::Kind::LikeParam});
  }
  return slots;
}

// Whether a parameter of that dtype is stepped in float32.
bool is_widened(const GroupSpec& spec, c10::ScalarType dtype) {
  return dtype == at::kBFloat16 && (spec.stochastic_rounding || spec.split_master);
}

RoundingPlace rounding_place(const GroupSpec& spec, const at::Tensor& param) {
  RoundingPlace place;
  if (!is_widened(spec, param.scalar_type())) {
    return place;
  }
  const std::vector<StateTensor> state = state_layout(spec, param.sizes(), param.scalar_type(), "");
  for (std::size_t i = 0; i < state.size(); ++i) {
    if (spec.split_master && state[i].name == kRemainder) {
      place.remainder = i;
    } else if (!spec.split_master && state[i].kind == StateTensor::Kind::Step) {
      place.step = i;
    }
  }
  return place;
}

} // namespace

std::shared_ptr<const StepPlan> find_plan(PlanHandle handle) {
  auto plan = PlanTable::instance().find(handle);
  TORCH_CHECK_VALUE(
      plan != nullptr, "muon: expected the handle of a live plan, got ", handle,
      "; call create_plan");
  return plan;
}

std::vector<SlotPlace> slot_places(const GroupSpec& spec) {
  std::vector<SlotPlace> places;
  std::size_t position = 0;
  for (const StateSlot& slot : state_slots(spec)) {
    const bool is_quantized =
        slot.kind == StateSlot::Kind::LikeParam && spec.state_format != StateFormat::Plain;
    places.push_back({slot.kind, position, is_quantized});
    position += is_quantized ? 2 : 1;
  }
  return places;
}

} // namespace detail

std::int64_t hyper_width(std::string_view algorithm) {
  return Hyper::kCount + static_cast<std::int64_t>(find_algorithm(algorithm).options.size());
}

PlanHandle create_plan(
    at::TensorList params, at::IntArrayRef groups, const std::vector<GroupSpec>& specs,
    const std::vector<std::string>& names) {
  TORCH_CHECK_VALUE(
      params.size() == groups.size() && params.size() == names.size(),
      "muon: expected one group and one name a parameter, got ", groups.size(), " and ",
      names.size(), " for ", params.size(), " parameters");
  auto result = std::make_shared<detail::StepPlan>();
  result->names = names;
  result->groups = groups.vec();
  result->specs = specs;
  for (const GroupSpec& spec : specs) {
    result->spec_texts.push_back(to_string(spec));
    result->algorithms.push_back(&find_algorithm(spec.algorithm));
    result->slots.push_back(detail::slot_places(spec));
    result->hyper_width = std::max(result->hyper_width, hyper_width(spec.algorithm));
  }
  std::vector<plan::Item> items;
  std::size_t state = 0;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    TORCH_CHECK_VALUE(
        groups[i] >= 0 && groups[i] < static_cast<std::int64_t>(specs.size()),
        "muon: expected a group below ", specs.size(), ", got ", groups[i], " (", names[i], ")");
    detail::check_param(params[i], names[i]);
    result->on_cpu = result->on_cpu && params[i].is_cpu();
    const Algorithm& algorithm = result->algorithm_of(index);
    result->sizes.push_back(params[i].sizes().vec());
    result->first_state.push_back(state);
    const GroupSpec& spec = result->spec_of(index);
    result->state.push_back(
        state_layout(spec, params[i].sizes(), params[i].scalar_type(), names[i]));
    state += result->state.back().size();
    result->rounding.push_back(detail::rounding_place(spec, params[i]));
    result->blocks.emplace_back();
    if (spec.state_format != StateFormat::Plain) {
      result->blocks.back() =
          detail::resolve_blocks(params[i].sizes(), params[i].is_complex(), spec, names[i]);
    }
    if (algorithm.is_elementwise()) {
      detail::add_elementwise(*result, index);
    } else {
      detail::add_matrices(*result, items, index, params[i]);
    }
  }
  result->plan = plan::build_plan(
      std::move(items), result->on_cpu ? detail::kCpuChunkBytes : detail::kDeviceChunkBytes);
  return detail::PlanTable::instance().add(std::move(result));
}

void free_plan(PlanHandle plan) {
  detail::PlanTable::instance().remove(plan);
}

std::string explain_plan(PlanHandle handle) {
  const auto plan = detail::find_plan(handle);
  std::string text = plan::explain(plan->plan);
  for (const detail::ElementwiseRun& run : plan->elementwise) {
    text +=
        c10::str("elementwise: ", run.params.size(), " parameters, ", run.algorithm->name, '\n');
  }
  return text;
}

std::int64_t workspace_bytes(PlanHandle handle) {
  const auto plan = detail::find_plan(handle);
  std::int64_t largest = 0;
  for (const plan::Chunk& chunk : plan->plan.chunks) {
    const plan::Item& item = plan->plan.items[static_cast<std::size_t>(chunk.pieces.front().item)];
    const std::int64_t n = std::min(item.rows, item.cols);
    const std::int64_t square = item.bytes_per_matrix / std::max(item.rows, item.cols) * n;
    // A CPU iterates one matrix after the other, with five squares of at most float64 beside it.
    const std::int64_t beside = plan->on_cpu
        ? item.bytes_per_matrix + 10 * square
        : chunk.matrices * (item.bytes_per_matrix + 3 * square);
    largest = std::max(largest, chunk.matrices * item.bytes_per_matrix + beside);
  }
  return largest;
}

std::vector<StateTensor> state_layout(
    const GroupSpec& spec, at::IntArrayRef sizes, c10::ScalarType dtype, std::string_view name) {
  using Kind = StateTensor::Kind;
  const bool is_complex = c10::isComplexType(dtype);
  std::optional<detail::BlockLayout> blocks;
  if (spec.state_format != StateFormat::Plain) {
    blocks = detail::resolve_blocks(sizes, is_complex, spec, name);
  }
  std::vector<StateTensor> result;
  for (const StateSlot& slot : detail::state_slots(spec)) {
    if (slot.kind == StateSlot::Kind::PerRow) {
      result.push_back(
          {slot.name, detail::row_statistics_sizes(sizes, spec.layout, name), Kind::Statistic});
    } else if (slot.kind == StateSlot::Kind::Step) {
      result.push_back({slot.name, {}, Kind::Step});
    } else if (blocks) {
      result.push_back(
          {slot.name, blocks->code_sizes(spec.state_format), Kind::Fixed,
           detail::code_dtype(spec.state_format)});
      result.push_back(
          {detail::scale_key(slot.name), blocks->scale_sizes(), Kind::Fixed, at::kFloat});
    } else {
      result.push_back({slot.name, sizes.vec(), Kind::LikeParam});
    }
  }
  const bool has_step = std::any_of(result.begin(), result.end(), [](const StateTensor& state) {
    return state.kind == Kind::Step;
  });
  if (detail::is_widened(spec, dtype) && spec.split_master) {
    result.push_back({detail::kRemainder, sizes.vec(), Kind::Fixed, at::kShort, true});
  } else if (detail::is_widened(spec, dtype) && !has_step) {
    result.push_back({"step", {}, Kind::Step, at::kFloat, true});
  }
  return result;
}

} // namespace muon
