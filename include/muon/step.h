#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include <muon/export.h>
#include <muon/matrix.h>
#include <muon/orthogonalize.h>

namespace muon {

/// Columns of the hyperparameter tensor [groups, Hyper::kCount or more],
/// float64 on the CPU. They are read at every step: changing one rebuilds
/// nothing. From kCount on: the options of the group's algorithm itself.
struct MUON_API Hyper {
  enum : std::int64_t {
    kLr,
    kWeightDecay,
    kMomentum,
    kEps, ///< Muon: lower bound of the norm; Adam: its denominator's eps
    kLrMultiplier, ///< factor on lr in the update, not in the decay
    kBeta1,
    kBeta2,
    kMuonBeta2, ///< NorMuon's second moment
    kNesterov, ///< flags are 0 or 1 from here on
    kMaximize,
    kCautious,
    kHeavyBall, ///< b = mu b + g instead of b = mu b + (1 - mu) g
    kDecayAdjusted, ///< decay by lr * multiplier * factor * wd (muonium)
    kCount,
  };
};

/// Columns that a group of `algorithm` needs.
MUON_API std::int64_t hyper_width(std::string_view algorithm);

/// What to do with a matrix whose gradient holds a NaN or an infinity.
enum class NonFinite : std::uint8_t {
  Propagate, ///< as torch: the matrix becomes non-finite
  Skip, ///< the matrix keeps its value and its momentum, and is counted
};

/// How a parameter's momentum or moments are stored: one number an entry, or
/// codes in blocks of 128 along a row with one float32 scale each.
enum class StateFormat : std::uint8_t {
  Plain, ///< a floating dtype
  Int8, ///< 1.03 bytes an entry
  Int4, ///< 0.53 bytes an entry
  Fp8, ///< float8_e4m3fn, 1.03 bytes an entry
};

/// The options of a group that shape the plan; what may change from step to
/// step is in `Hyper`.
struct MUON_API GroupSpec {
  std::string algorithm = "muon";
  MatrixLayout layout;
  AdjustLr adjust_lr = AdjustLr::Original;
  OrthogonalizeOptions orthogonalize; ///< its eps is unused: see Hyper::kEps
  std::int64_t batch_size = 0; ///< matrices a batch at most; 0: by bytes
  NonFinite nonfinite = NonFinite::Propagate;
  bool amsgrad = false; ///< Adam: keep the maximum of exp_avg_sq
  bool decoupled = true; ///< Adam: decoupled decay (AdamW)
  StateFormat state_format = StateFormat::Plain;
  bool stochastic_rounding = false; ///< of bfloat16 parameters
  bool split_master = false; ///< bfloat16 parameters keep 16 more bits: float32
  bool offload = false; ///< state lives in host memory
};

/// The text form in which a spec crosses the op boundary, "key=value;...":
///   algorithm=<name>; rows, cols=<dims>; flatten, complex_dim=0|1;
///   batch_dims=<k>; split_sizes=<sizes>; num_heads=<k>; split_dim=0|1;
///   adjust_lr=original|match_rms_adamw|spectral_unclamped|unscaled;
///   schedule=<name> or coefficients=a,b,c,a,b,c,...; steps=<k>;
///   normalization=clamp|add; norm_factor=<f>;
///   compute_dtype=auto|float64|float32|bfloat16|float16;
///   form=auto|standard|gram|gram_x_restart; batch_size=<k>;
///   nonfinite=propagate|skip; amsgrad, decoupled=0|1;
///   state_format=plain|int8|int4|fp8; stochastic_rounding, split_master,
///   offload=0|1.
/// Missing keys keep their defaults; `normalization` and `norm_factor` override
/// the schedule's. Unknown keys and bad values are a ValueError naming them.
MUON_API GroupSpec parse_group_spec(std::string_view text);
MUON_API std::string to_string(const GroupSpec& spec);

/// Which matrices of which parameter are computed together, in which order. A
/// plan holds shapes and indices, never tensors or hyperparameters, and lives
/// in a process-wide table under its handle.
using PlanHandle = std::int64_t;

/// Builds a plan for `params`; `groups[i]` says which of `specs` parameter i
/// follows; `names[i]` is for error texts. Throws before anything is stored.
MUON_API PlanHandle create_plan(
    at::TensorList params, at::IntArrayRef groups, const std::vector<GroupSpec>& specs,
    const std::vector<std::string>& names);

/// Forgets a plan; unknown handles are ignored.
MUON_API void free_plan(PlanHandle plan);

/// One line a chunk: which matrices, which form, what it costs.
MUON_API std::string explain_plan(PlanHandle plan);

/// Bytes that a step takes beyond parameters, gradients and state: its largest
/// batch of matrices and what the iteration keeps beside it, an upper estimate.
MUON_API std::int64_t workspace_bytes(PlanHandle plan);

/// One tensor of the state that a spec keeps for a parameter.
struct MUON_API StateTensor {
  enum class Kind : std::uint8_t {
    LikeParam, ///< the parameter's shape and strides, dtype by `state_dtype`
    Statistic, ///< float32; of float64 and complex128 parameters float64
    Step, ///< 0-d float32 on the CPU
    Fixed, ///< contiguous, of `dtype`: codes, scales, remainders
  };
  std::string name;
  std::vector<std::int64_t> sizes;
  Kind kind = Kind::LikeParam;
  c10::ScalarType dtype = c10::ScalarType::Float; ///< where the kind says so
  bool is_optional = false; ///< state of a run that kept none begins as zero
};

/// The state that `spec` keeps for a parameter of these sizes and dtype, in the
/// order in which `step_` takes the tensors: the slots of its algorithm, a
/// quantised one as codes "x" and "x_scale"; "step" where stochastic rounding
/// needs a count; "param_remainder" (int16) of a split bfloat16 parameter.
MUON_API std::vector<StateTensor> state_layout(
    const GroupSpec& spec, at::IntArrayRef sizes, c10::ScalarType dtype, std::string_view name);

/// One optimizer step over all parameters of a plan, in place.
///
/// `params`, `grads` (undefined: no gradient in this step, the parameter and
/// its state stay as they are) in plan order; `state` is the concatenation of
/// `state_layout` over the parameters. `hyper` is as wide as the algorithm with
/// the most options of its own needs: [groups, Hyper::kCount + options].
/// `grad_scale` (1 element) divides every gradient; `found_inf` (1 element)
/// other than zero makes the step leave no trace. `skipped` (int64, one value
/// a parameter) counts matrices that NonFinite::Skip left alone.
MUON_API void step_(
    PlanHandle plan, at::TensorList params, const std::vector<at::Tensor>& grads,
    at::TensorList state, const at::Tensor& hyper, const at::Tensor& grad_scale = {},
    const at::Tensor& found_inf = {}, const at::Tensor& skipped = {});

} // namespace muon
