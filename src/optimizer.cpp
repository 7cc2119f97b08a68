#include <muon/optimizer.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "group_checks.h"
#include "param_state.h"

namespace muon {

using torch::optim::OptimizerParamGroup;

namespace {

constexpr PlanHandle kNoPlan = -1; // free_plan ignores it

OptimizerParamGroup named_group(const torch::OrderedDict<std::string, at::Tensor>& named_params) {
  auto options = std::make_unique<MuonOptions>();
  options->param_names(named_params.keys());
  return {named_params.values(), std::move(options)};
}

} // namespace

// The parameters that take part in a step, group by group.
struct Muon::Live {
  std::vector<at::Tensor> params;
  std::vector<std::int64_t> groups;
  std::vector<std::size_t> indices; // within their groups

  explicit Live(const std::vector<OptimizerParamGroup>& param_groups) {
    for (std::size_t g = 0; g < param_groups.size(); ++g) {
      const std::vector<at::Tensor>& members = param_groups[g].params();
      for (std::size_t i = 0; i < members.size(); ++i) {
        if (detail::takes_part(members[i])) {
          params.push_back(members[i]);
          groups.push_back(static_cast<std::int64_t>(g));
          indices.push_back(i);
        }
      }
    }
  }
};

// The plan and what it was built for. Dropping it costs time, never results.
struct Muon::Cache {
  struct Param {
    const at::TensorImpl* impl;
    std::vector<std::int64_t> sizes;
    c10::ScalarType dtype;
    c10::Device device;
    std::int64_t group;
    std::string name;
    std::vector<StateTensor> slots;
  };

  std::vector<Param> params;
  std::vector<MuonOptions> options; // of every group, as last checked
  std::size_t resolved = 0; // so many groups have gone through `resolve`
  PlanHandle plan = kNoPlan;
  at::Tensor hyper; // float64 [groups, as wide as the widest algorithm's]
  at::Tensor skipped; // int64 [params]

  Cache() = default;
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;
  ~Cache() {
    free_plan(plan);
  }

  bool holds(const Live& live) const {
    if (live.params.size() != params.size()) {
      return false;
    }
    for (std::size_t i = 0; i < params.size(); ++i) {
      const Param& planned = params[i];
      const at::Tensor& param = live.params[i];
      if (planned.impl != param.unsafeGetTensorImpl() || planned.group != live.groups[i] ||
          planned.sizes != param.sizes() || planned.dtype != param.scalar_type() ||
          planned.device != param.device()) {
        return false;
      }
    }
    return true;
  }

  // Checks what has changed in the groups' options; false if the plan no longer fits them.
  bool follow(const Muon& muon) {
    if (options.size() != muon.param_groups().size()) {
      return false;
    }
    bool fits = true;
    for (std::size_t g = 0; g < options.size(); ++g) {
      const MuonOptions& current = muon.options(g);
      if (!(options[g] == current)) {
        current.check(detail::group_label(current, g));
        if (options[g].same_plan(current)) {
          options[g] = current;
        } else {
          fits = false;
        }
      }
    }
    return fits;
  }

  // Goes on counting for the parameters that `old` knows.
  void take_counts(const Cache& old) {
    std::unordered_map<const at::TensorImpl*, std::int64_t> place;
    for (std::size_t i = 0; i < old.params.size(); ++i) {
      place[old.params[i].impl] = static_cast<std::int64_t>(i);
    }
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (const auto found = place.find(params[i].impl); found != place.end()) {
        skipped[static_cast<std::int64_t>(i)].copy_(old.skipped[found->second]);
      }
    }
  }
};

Muon::Muon(const std::vector<OptimizerParamGroup>& param_groups, MuonOptions defaults)
    : Optimizer(param_groups, std::make_unique<MuonOptions>(std::move(defaults))),
      cache_(std::make_unique<Cache>()) {
  static_cast<const MuonOptions&>(*defaults_).resolved({}).check("defaults");
  // torch 2.15 merges the options of its own optimizers only and gives every other group the
  // defaults: the groups' own options are put back, merged by us.
  std::vector<MuonOptions> resolved = resolve(param_groups, 0);
  for (std::size_t g = 0; g < resolved.size(); ++g) {
    param_groups_[g].set_options(std::make_unique<MuonOptions>(std::move(resolved[g])));
  }
  cache_->resolved = resolved.size();
}

Muon::Muon(std::vector<at::Tensor> params, MuonOptions defaults)
    : Muon(
          std::vector<OptimizerParamGroup>{OptimizerParamGroup(std::move(params))},
          std::move(defaults)) {}

Muon::Muon(const torch::OrderedDict<std::string, at::Tensor>& named_params, MuonOptions defaults)
    : Muon(std::vector<OptimizerParamGroup>{named_group(named_params)}, std::move(defaults)) {}

Muon::Muon(Muon&&) noexcept = default;
Muon& Muon::operator=(Muon&&) noexcept = default;
Muon::~Muon() = default;

void Muon::add_param_group(const OptimizerParamGroup& param_group) {
  std::vector<MuonOptions> resolved = resolve({param_group}, param_groups_.size());
  Optimizer::add_param_group(OptimizerParamGroup(param_group.params()));
  param_groups_.back().set_options(std::make_unique<MuonOptions>(std::move(resolved.front())));
  cache_->resolved = param_groups_.size();
}

// The complete options of `groups`, which come after the first `first` of param_groups_; throws
// where options or parameters are wrong.
std::vector<MuonOptions> Muon::resolve(
    const std::vector<OptimizerParamGroup>& groups, std::size_t first) const {
  const auto& defaults = static_cast<const MuonOptions&>(*defaults_);
  std::unordered_set<const at::TensorImpl*> seen;
  bool one_lr_fits_all = true;
  const auto look_at = [&](const MuonOptions& options) {
    one_lr_fits_all = one_lr_fits_all &&
        (detail::is_elementwise(options) || options.adjust_lr() == AdjustLr::MatchRmsAdamw);
  };
  for (std::size_t g = 0; g < first; ++g) {
    look_at(options(g));
    for (const at::Tensor& param : param_groups_[g].params()) {
      seen.insert(param.unsafeGetTensorImpl());
    }
  }

  std::vector<MuonOptions> resolved;
  detail::MatrixCheck matrices;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const std::size_t g = first + i;
    resolved.push_back(detail::own_options(groups[i], g).resolved(defaults));
    const MuonOptions& options = resolved.back();
    options.check(detail::group_label(options, g));
    detail::check_params(groups[i].params(), options, g, seen);
    matrices.add(groups[i].params(), options, g);
    look_at(options);
  }
  matrices.finish();

  for (std::size_t i = 0; i < groups.size(); ++i) {
    const bool same_kind = detail::is_elementwise(resolved[i]) == detail::is_elementwise(defaults);
    TORCH_CHECK_VALUE(
        one_lr_fits_all || same_kind || detail::own_options(groups[i], first + i).lr_.given,
        "muon: expected an lr of its own for the group with algorithm \"", resolved[i].algorithm(),
        "\", got none: that of \"", defaults.algorithm(),
        "\" fits it only where every matrix group uses AdjustLr::MatchRmsAdamw (",
        detail::group_label(resolved[i], first + i), ")");
  }
  return resolved;
}

at::Tensor Muon::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  update({}, {});
  return loss;
}

void Muon::scaled_step(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  const at::NoGradGuard no_grad;
  update(grad_scale, found_inf);
}

void Muon::update(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  const Live live(param_groups_);
  if (!cache_->follow(*this) || cache_->plan == kNoPlan || !cache_->holds(live)) {
    rebuild(live);
  }
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> state;
  grads.reserve(live.params.size());
  for (std::size_t i = 0; i < live.params.size(); ++i) {
    const at::Tensor& param = live.params[i];
    grads.push_back(param.grad());
    auto& tensors = param_state(param).tensors();
    for (const StateTensor& slot : cache_->params[i].slots) {
      at::Tensor& tensor = tensors[slot.name];
      if (!tensor.defined()) {
        const auto group = static_cast<std::size_t>(live.groups[i]);
        tensor = detail::create_state(slot, param, options(group));
      }
      state.push_back(tensor);
    }
  }
  auto* row = cache_->hyper.mutable_data_ptr<double>();
  for (std::size_t g = 0; g < param_groups_.size(); ++g, row += cache_->hyper.size(1)) {
    options(g).write_hyper(row);
  }
  step_(
      cache_->plan, live.params, grads, state, cache_->hyper, grad_scale, found_inf,
      cache_->skipped);
}

// Builds the plan for what is there now; the state follows.
void Muon::rebuild(const Live& live) {
  for (std::size_t& g = cache_->resolved; g < param_groups_.size(); ++g) {
    std::vector<MuonOptions> resolved = resolve({param_groups_[g]}, g);
    param_groups_[g].set_options(std::make_unique<MuonOptions>(std::move(resolved.front())));
  }

  auto fresh = std::make_unique<Cache>();
  fresh->resolved = param_groups_.size();
  std::vector<GroupSpec> specs;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    fresh->options.push_back(options(g));
    specs.push_back(options(g).spec());
  }
  std::vector<std::string> names;
  for (std::size_t i = 0; i < live.params.size(); ++i) {
    const auto group = static_cast<std::size_t>(live.groups[i]);
    const at::Tensor& param = live.params[i];
    names.push_back(detail::param_label(options(group), group, live.indices[i]));
    fresh->params.push_back(
        {param.unsafeGetTensorImpl(), param.sizes().vec(), param.scalar_type(), param.device(),
         live.groups[i], names.back(),
         state_layout(specs[group], param.sizes(), param.scalar_type(), names.back())});
  }
  fresh->plan = create_plan(live.params, live.groups, specs, names);
  const auto groups = static_cast<std::int64_t>(specs.size());
  std::int64_t width = Hyper::kCount;
  for (const GroupSpec& spec : specs) {
    width = std::max(width, hyper_width(spec.algorithm));
  }
  fresh->hyper = at::zeros({groups, width}, at::kDouble);
  fresh->skipped = at::zeros({static_cast<std::int64_t>(names.size())}, at::kLong);
  fresh->take_counts(*cache_);
  cache_ = std::move(fresh);

  drop_foreign_state();
  for (std::size_t i = 0; i < live.params.size(); ++i) {
    const auto group = static_cast<std::size_t>(live.groups[i]);
    detail::fit_state(param_state(live.params[i]), live.params[i], options(group), names[i]);
  }
}

// Forgets the state of parameters that are in no group any more.
void Muon::drop_foreign_state() {
  decltype(state_) kept;
  for (const OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const auto found = state_.find(param.unsafeGetTensorImpl());
      if (found != state_.end()) {
        kept[found->first] = std::move(found->second);
      }
    }
  }
  state_ = std::move(kept);
}

MuonParamState& Muon::param_state(const at::Tensor& param) {
  auto& state = state_[param.unsafeGetTensorImpl()];
  if (!state) {
    state = std::make_unique<MuonParamState>(param);
  }
  return static_cast<MuonParamState&>(*state);
}

MuonOptions& Muon::options(std::size_t group) {
  return const_cast<MuonOptions&>(std::as_const(*this).options(group));
}

const MuonOptions& Muon::options(std::size_t group) const {
  TORCH_CHECK_INDEX(
      group < param_groups_.size(), "muon: expected a group below ", param_groups_.size(), ", got ",
      group);
  return detail::own_options(param_groups_[group], group);
}

void Muon::set_lr(double lr) {
  for (OptimizerParamGroup& group : param_groups_) {
    group.options().set_lr(lr);
  }
}

std::vector<std::pair<std::string, std::int64_t>> Muon::skipped() const {
  std::vector<std::pair<std::string, std::int64_t>> counts;
  for (std::size_t i = 0; i < cache_->params.size(); ++i) {
    const auto count = cache_->skipped[static_cast<std::int64_t>(i)].item<std::int64_t>();
    if (count != 0) {
      counts.emplace_back(cache_->params[i].name, count);
    }
  }
  return counts;
}

} // namespace muon
