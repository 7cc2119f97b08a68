#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <muon/export.h>
#include <muon/matrix.h>
#include <muon/orthogonalize.h>
#include <muon/schedule.h>
#include <muon/step.h>

namespace muon {

/// What the momentum buffer holds. With a constant momentum both give the same
/// orthogonalised update, up to `eps`.
enum class MomentumForm : std::uint8_t {
  Ema, ///< b = mu b + (1 - mu) g, as torch.optim.Muon
  HeavyBall, ///< b = mu b + g, as muonium
};

/// The learning rate that decay is multiplied by.
enum class DecayLr : std::uint8_t {
  Plain, ///< lr, as torch.optim.Muon
  Adjusted, ///< lr * lr_multiplier * shape factor, as muonium
};

using Betas = std::tuple<double, double>;

/// Values of a registered algorithm's own options (`Algorithm::options`), by name.
using AlgorithmOptions = std::map<std::string, double>;

// clang-format off
/// Every option of a parameter group, once: role, type, name, initial value.
///   live  read at every step; a schedule may move it, nothing is rebuilt
///   plan  shapes the plan
///   run   how this run computes and stores; `load` leaves it alone
///   note  about this group's parameters; never inherited, left alone by `load`
#define MUON_OPTIONS(OPTION)                                                                       \
  OPTION(live, double, lr, 1e-3)                                                                   \
  /* decoupled (coupled in "adam"); where the algorithm is Adam, initially 0.01 (0) and 1e-8 */    \
  OPTION(live, double, weight_decay, 0.1)                                                          \
  OPTION(live, double, eps, 1e-7)                     /* lower bound of a matrix's norm */         \
  OPTION(live, double, lr_multiplier, 1.0)            /* on lr in the update, not in the decay */  \
  OPTION(live, double, momentum, 0.95)                                                             \
  OPTION(live, MomentumForm, momentum_form, MomentumForm::Ema)                                     \
  OPTION(live, bool, nesterov, true)                                                               \
  OPTION(live, bool, maximize, false)                                                              \
  OPTION(live, bool, cautious, false)                 /* decay only along the update's sign */    \
  OPTION(live, DecayLr, decay_lr, DecayLr::Plain)                                                  \
  OPTION(live, double, muon_beta2, 0.95)              /* NorMuon's second moment */                \
  OPTION(live, Betas, betas, (Betas{0.9, 0.95}))      /* Adam's */                                 \
  OPTION(live, AlgorithmOptions, algorithm_options, {})  /* of an algorithm of the user's */       \
  OPTION(plan, bool, amsgrad, false)                  /* Adam's */                                 \
  OPTION(plan, std::string, algorithm, "muon")        /* a registered name, in any case */         \
  OPTION(plan, AdjustLr, adjust_lr, AdjustLr::Original)                                            \
  OPTION(plan, Schedule, schedule, find_schedule("muon"))                                          \
  OPTION(plan, std::optional<std::int64_t>, ns_steps, std::nullopt)          /* the schedule's */  \
  OPTION(plan, std::optional<Normalization>, normalization, std::nullopt)    /* the schedule's */  \
  OPTION(plan, std::optional<double>, norm_factor, std::nullopt)             /* the schedule's */  \
  OPTION(plan, std::optional<c10::ScalarType>, compute_dtype, std::nullopt)  /* chosen */          \
  OPTION(plan, NonFinite, nonfinite, NonFinite::Propagate)                                         \
  /* how parameters are matrices: see MatrixLayout */                                              \
  OPTION(plan, std::vector<std::int64_t>, rows, {})                                                \
  OPTION(plan, std::vector<std::int64_t>, cols, {})                                                \
  OPTION(plan, bool, flatten, false)                                                               \
  OPTION(plan, std::int64_t, batch_dims, -1)                                                       \
  OPTION(plan, bool, complex_dim, false)                                                           \
  OPTION(plan, std::vector<std::int64_t>, split_sizes, {})                                         \
  OPTION(plan, std::int64_t, num_heads, 0)                                                         \
  OPTION(plan, std::int64_t, split_dim, 0)                                                         \
  /* of momentum and moments: the gradient's, a floating dtype, or a format in blocks of 128: Char   \
     (int8), Int4, Float8_e4m3fn; see StateFormat */                                               \
  OPTION(run, std::optional<c10::ScalarType>, state_dtype, std::nullopt)                           \
  OPTION(run, bool, stochastic_rounding, false)       /* of bfloat16 parameters */                 \
  OPTION(run, bool, split_master, false)              /* they keep 16 bits more: float32 steps */  \
  OPTION(run, bool, offload, false)                   /* state lives in host memory */             \
  OPTION(run, Form, form, Form::Auto)                                                              \
  OPTION(run, std::int64_t, batch_size, 0)            /* matrices a batch at most; 0: by bytes */  \
  OPTION(note, std::vector<std::string>, param_names, {})  /* one a parameter, or none */          \
  OPTION(note, std::vector<std::string>, reasons, {})      /* why this algorithm; see describe */
// clang-format on

namespace detail {

template <typename T>
struct Option {
  T value;
  bool given = false;
};

} // namespace detail

/// The options of a parameter group, or the defaults of an optimizer.
///
/// Each option `x` of MUON_OPTIONS has a fluent setter `x(value)`, a const
/// accessor and a mutable one. Setter and mutable accessor mark it as given: a
/// group inherits what was not given from the optimizer's defaults, value by
/// value (`resolved`).
class MUON_API MuonOptions : public torch::optim::OptimizerCloneableOptions<MuonOptions> {
 public:
  MuonOptions() = default;
  MuonOptions(double lr) { // NOLINT(google-explicit-constructor): as torch's
    this->lr(lr);
  }

#define MUON_DECLARE_OPTION(role, type, name, ...) \
 public:                                           \
  MuonOptions& name(type value) {                  \
    name##_ = {std::move(value), true};            \
    return *this;                                  \
  }                                                \
  const type& name() const noexcept {              \
    return name##_.value;                          \
  }                                                \
  type& name() noexcept {                          \
    name##_.given = true;                          \
    return name##_.value;                          \
  }                                                \
                                                   \
 private:                                          \
  detail::Option<type> name##_{__VA_ARGS__};
  MUON_OPTIONS(MUON_DECLARE_OPTION)
#undef MUON_DECLARE_OPTION

 public:
  /// A named schedule; ValueError that lists the names for an unknown one.
  MuonOptions& schedule(std::string_view name);
  /// The same triple in every iteration, 5 unless `ns_steps` says otherwise.
  MuonOptions& ns_coefficients(const Coefficients& triple);
  /// One triple an iteration.
  MuonOptions& ns_coefficients(std::vector<Coefficients> triples);

  /// One option that the group's algorithm itself has.
  MuonOptions& algorithm_option(const std::string& name, double value);

  /// All of MatrixLayout at once.
  MuonOptions& layout(const MatrixLayout& layout);
  MatrixLayout layout() const;

  /// These options with everything that was not given filled in, and all of it
  /// marked as given. Values come from `defaults`, except that
  ///   - a choice of rows/cols, flatten or batch_dims replaces the defaults'
  ///     choice as a whole, and so do split_sizes and num_heads;
  ///   - the algorithm's own options are merged one by one: given here, given in
  ///     `defaults` for the same algorithm, the algorithm's;
  ///   - weight decay, eps, betas and amsgrad are the algorithm's own where
  ///     one side is elementwise (Adam) and the other is not.
  MuonOptions resolved(const MuonOptions& defaults) const;

  /// The names of the options that were given.
  std::vector<std::string_view> given() const;
  /// Takes over what `other` was given. Where both were given an option with
  /// different values, returns its name and changes nothing; else "".
  std::string_view merge(const MuonOptions& other);

  /// Throws ValueError for a value out of range, or for an option that the
  /// group's algorithm does not have, and for one that is not a number; `who` names the group.
  void check(std::string_view who) const;

  /// The part that shapes the plan.
  GroupSpec spec() const;
  /// Whether both lead to the same plan: equal but for live options and notes.
  bool same_plan(const MuonOptions& other) const;
  /// Takes what belongs to the run and to the parameters from `other`.
  void keep_from(const MuonOptions& other);
  /// Writes the live options into a row of the hyperparameter tensor, as wide
  /// as `hyper_width(algorithm())`.
  void write_hyper(double* row) const;

  double get_lr() const override;
  void set_lr(double lr) override;

  /// Every option is written; what is read counts as given.
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;

  /// Compares the values, not which of them were given.
  friend MUON_API bool operator==(const MuonOptions& a, const MuonOptions& b);

 private:
  friend class Muon; // reads which options were given
  void check_iteration(std::string_view who) const;
  void check_algorithm(std::string_view who) const;
};

/// The state of one parameter: tensors by key ("momentum_buffer", "exp_avg",
/// ...), so that a custom algorithm keeps its own here too.
class MUON_API MuonParamState : public torch::optim::OptimizerCloneableParamState<MuonParamState> {
 public:
  MuonParamState() = default;
  /// Empty state of `param`, which it refers to weakly: as long as the state
  /// exists, no other tensor can have the address under which it is found.
  explicit MuonParamState(const at::Tensor& param);

  const std::map<std::string, at::Tensor>& tensors() const noexcept {
    return tensors_;
  }
  std::map<std::string, at::Tensor>& tensors() noexcept {
    return tensors_;
  }
  /// The tensor of that key; undefined where there is none.
  at::Tensor get(const std::string& key) const;

  /// Undefined tensors are not written; reading replaces everything.
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;

 private:
  std::map<std::string, at::Tensor> tensors_;
  std::optional<c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>> param_;
};

/// Muon, NorMuon and Adam over the parameters of a whole model.
///
/// Behaves as LibTorch's own optimizers do: schedulers, closures, torch::save
/// and torch::load, options per group. Options and shapes are checked when a
/// group is added; the state is created at the first step, for every parameter
/// that requires a gradient. One optimizer belongs to one thread at a time.
///
/// A group inherits the defaults' lr if both are about matrices or both about
/// elements, or if every matrix group uses AdjustLr::MatchRmsAdamw; else it
/// needs its own.
///
/// Groups are added through `muon::Muon`: torch's own add_param_group, reached
/// through a torch::optim::Optimizer&, drops a group's options.
class MUON_API Muon : public torch::optim::Optimizer {
 public:
  explicit Muon(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      MuonOptions defaults = {});
  explicit Muon(std::vector<at::Tensor> params, MuonOptions defaults = {});
  /// Named parameters, as `model->named_parameters()` gives them.
  explicit Muon(
      const torch::OrderedDict<std::string, at::Tensor>& named_params, MuonOptions defaults = {});
  Muon(Muon&&) noexcept;
  Muon& operator=(Muon&&) noexcept;
  ~Muon() override;

  /// Adds a group, whose options inherit from the defaults; throws before
  /// anything changes.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// One step; `closure` runs with gradients enabled and its loss is returned.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// One step under loss scaling: gradients are divided by `grad_scale` (one
  /// element; undefined: they are unscaled already), and a `found_inf` (one
  /// element) other than zero makes the step leave no trace. With
  /// `scale`, `found_inf`, `growth_tracker` (int32) one-element tensors, a loop is
  ///
  ///   (model->forward(x) * scale).backward();
  ///   at::_amp_foreach_non_finite_check_and_unscale_(grads, found_inf.zero_(), scale.reciprocal());
  ///   optimizer.scaled_step({}, found_inf);
  ///   at::_amp_update_scale_(scale, growth_tracker, found_inf, 2.0, 0.5, 2000);
  void scaled_step(const at::Tensor& grad_scale, const at::Tensor& found_inf);

  /// State and options, in the format of LibTorch's optimizers.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Succeeds as a whole or leaves the optimizer as it was. Options of this run
  /// stay (MUON_OPTIONS: run, note); the state gets the dtype and the device that
  /// this optimizer would have created it with.
  void load(torch::serialize::InputArchive& archive) override;

  /// A group's options.
  MuonOptions& options(std::size_t group = 0);
  const MuonOptions& options(std::size_t group = 0) const;

  /// The learning rate of every group.
  void set_lr(double lr);

  /// lr * lr_multiplier * shape factor, for each matrix shape in `param` (one,
  /// unless its layout splits it).
  std::vector<double> effective_lr(const at::Tensor& param) const;

  /// A table of every parameter: name, shape, how it is matrices, algorithm,
  /// why, effective lr, lr * weight decay, shape factor; then the totals.
  std::string describe() const;

  /// How many matrices of which parameter NonFinite::Skip has left alone.
  std::vector<std::pair<std::string, std::int64_t>> skipped() const;

 private:
  struct Cache;
  struct Live;

  std::vector<MuonOptions> resolve(
      const std::vector<torch::optim::OptimizerParamGroup>& groups, std::size_t first) const;
  void update(const at::Tensor& grad_scale, const at::Tensor& found_inf);
  void rebuild(const Live& live);
  void drop_foreign_state();
  MuonParamState& param_state(const at::Tensor& param);

  std::unique_ptr<Cache> cache_;
};

} // namespace muon
