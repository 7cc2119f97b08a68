// The code of docs/cpp.md, compiled and run; tests/python/test_docs.py compares the two.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <memory>
#include <utility>
#include <vector>

#include <muon/muon.h>
#include <torch/torch.h>

namespace {

using Params = std::vector<torch::Tensor>;
using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

// Four experts between an embedding and a head.
struct NetImpl : torch::nn::Module {
  torch::nn::Embedding embed{64, 16};
  torch::nn::Linear query{16, 16};
  torch::nn::Linear head{16, 64};
  torch::Tensor experts = torch::randn({4, 16, 16}) / 4;

  NetImpl() {
    register_module("embed", embed);
    register_module("query", query);
    register_parameter("experts", experts);
    register_module("head", head);
  }

  torch::Tensor loss(const torch::Tensor& tokens) {
    torch::Tensor x = embed(tokens);
    x = x + torch::relu(query(x));
    x = x + torch::einsum("bi,eoi->bo", {x, experts}) / 4;
    return torch::nn::functional::cross_entropy(head(x), tokens);
  }
};
TORCH_MODULE(Net);

torch::Tensor tokens() {
  return torch::randint(64, {32});
}

std::pair<Params, Params> split_by_dims(const Params& params) {
  Params matrices, others;
  for (const torch::Tensor& param : params) {
    (param.dim() == 2 ? matrices : others).push_back(param);
  }
  return {matrices, others};
}

void whole_model() {
  Net model;
  const std::vector<muon::Rule> rules = {
      {"experts", muon::MuonOptions().batch_dims(1)},
      {"query.weight", muon::MuonOptions().num_heads(4)},
      muon::Rule::of<torch::nn::EmbeddingImpl>(muon::MuonOptions().weight_decay(0.0)),
  };
  muon::Muon optimizer(muon::group_parameters(*model, rules), muon::MuonOptions(3e-3));
  std::cout << optimizer.describe() << '\n';
}

void matrices_alone() {
  torch::nn::Linear layer(32, 16);
  muon::Muon optimizer(Params{layer->weight}, muon::MuonOptions(2e-2).weight_decay(0.1));
  layer(torch::randn({8, 32})).square().mean().backward();
  optimizer.step();
}

void own_groups() {
  torch::nn::Linear layer(32, 16);
  const auto [matrices, others] = split_by_dims(layer->parameters());
  ParamGroups groups;
  groups.emplace_back(
      matrices, std::make_unique<muon::MuonOptions>(muon::MuonOptions(2e-2).momentum(0.9)));
  groups.emplace_back(
      others, std::make_unique<muon::MuonOptions>(muon::MuonOptions(3e-4).algorithm("adamw")));
  muon::Muon optimizer(groups, muon::MuonOptions().weight_decay(0.05).nesterov(false));

  TORCH_CHECK(optimizer.options(0).momentum() == 0.9); // asked for
  TORCH_CHECK(optimizer.options(0).weight_decay() == 0.05); // from the defaults
  TORCH_CHECK(optimizer.options(1).weight_decay() == 0.01); // AdamW's own: decay does not cross

  optimizer.options(1).lr(1e-4); // read at the next step
  optimizer.set_lr(1e-3); // in every group
}

void layouts() {
  const auto conv = torch::randn({16, 8, 3, 3}, torch::requires_grad());
  const auto experts = torch::randn({8, 32, 16}, torch::requires_grad());
  const auto qkv = torch::randn({96, 32}, torch::requires_grad());
  const auto group = [](const torch::Tensor& param, const muon::MuonOptions& options) {
    return torch::optim::OptimizerParamGroup({param}, std::make_unique<muon::MuonOptions>(options));
  };
  const muon::MuonOptions base(2e-2);
  muon::Muon optimizer(
      ParamGroups{
          group(conv, muon::MuonOptions(base).flatten(true)), // 16 x 72
          group(experts, muon::MuonOptions(base).batch_dims(1)), // 8 of 32 x 16
          group(qkv, muon::MuonOptions(base).split_sizes({64, 16, 16})), // 64 x 32, two of 16 x 32
      });
  std::cout << optimizer.describe() << '\n';
}

void schedules() {
  Net model;
  muon::Muon optimizer(
      muon::group_parameters(*model, {{"experts", muon::MuonOptions().batch_dims(1)}}),
      muon::MuonOptions(3e-3));
  torch::optim::StepLR schedule(optimizer, /*step_size=*/2, /*gamma=*/0.5);
  for (int step = 0; step < 4; ++step) {
    const torch::Tensor loss = model->loss(tokens());
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    schedule.step();
  }
}

// Warm-up over the first `warmup` steps, then constant. step() sets the rate of the next step.
class Warmup : public torch::optim::LRScheduler {
 public:
  Warmup(torch::optim::Optimizer& optimizer, unsigned warmup)
      : LRScheduler(optimizer), peaks_(get_current_lrs()), warmup_(warmup) {}

 private:
  std::vector<double> get_lrs() override {
    std::vector<double> lrs = peaks_;
    for (double& lr : lrs) {
      lr *= std::min(1.0, (step_count_ + 1.0) / warmup_);
    }
    return lrs;
  }

  std::vector<double> peaks_;
  unsigned warmup_;
};

void warm_up() {
  torch::nn::Linear layer(8, 4);
  muon::Muon optimizer(Params{layer->weight}, muon::MuonOptions(2e-2));
  Warmup schedule(optimizer, 10);
  schedule.step(); // before the first optimizer step
  TORCH_CHECK(std::abs(optimizer.options(0).lr() - 2e-3) < 1e-12);
}

void loss_scaling() {
  torch::nn::Linear layer(8, 4);
  muon::Muon optimizer(Params{layer->weight}, muon::MuonOptions(2e-2));
  torch::Tensor scale = torch::full({1}, 65536.0);
  torch::Tensor growth_tracker = torch::zeros({1}, torch::kInt);
  torch::Tensor found_inf = torch::zeros({1});
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    (layer(torch::randn({8, 8})).square().mean() * scale).backward();
    std::vector<torch::Tensor> grads = {layer->weight.grad()};
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found_inf.zero_(), scale.reciprocal());
    optimizer.scaled_step({}, found_inf);
    at::_amp_update_scale_(scale, growth_tracker, found_inf, 2.0, 0.5, 2000);
  }
}

void save_and_load() {
  torch::nn::Linear layer(8, 4);
  muon::Muon optimizer(Params{layer->weight}, muon::MuonOptions(2e-2));
  layer(torch::randn({8, 8})).square().mean().backward();
  optimizer.step();
  const auto file = (std::filesystem::temp_directory_path() / "muon_guide.pt").string();

  torch::save(optimizer, file);
  muon::Muon loaded(Params{layer->weight}, muon::MuonOptions(1.0));
  torch::load(loaded, file);
  TORCH_CHECK(loaded.options(0).lr() == 2e-2); // options come from the file
  std::filesystem::remove(file);
}

// A stage of our own: no row of the update is longer than 1.
void clip_rows_(
    at::TensorList matrices, at::TensorList /*state*/, const at::Tensor& /*hyper*/,
    at::IntArrayRef /*groups*/) {
  for (const at::Tensor& u : matrices) { // [batch, rows, cols]
    u.div_(at::linalg_vector_norm(u, 2, at::IntArrayRef{-1}, /*keepdim=*/true).clamp_min(1.0));
  }
}

TORCH_LIBRARY(guide, m) {
  m.def(
      "clip_rows_(Tensor(a!)[] matrices, Tensor(b!)[] state, Tensor hyper, int[] groups) -> ()",
      &clip_rows_);
}

void algorithm_of_our_own() {
  muon::Algorithm clipped;
  clipped.name = "muon_clipped";
  clipped.state = {{"momentum_buffer", muon::StateSlot::Kind::LikeParam}};
  clipped.refine = "guide::clip_rows_"; // the other stages are Muon's
  muon::register_algorithm(clipped);

  torch::nn::Linear layer(8, 4);
  muon::Muon optimizer(Params{layer->weight}, muon::MuonOptions(2e-2).algorithm("muon_clipped"));
  layer(torch::randn({8, 8})).square().mean().backward();
  optimizer.step();
}

void clip_attention() {
  torch::nn::Linear query(64, 64), key(64, 64);
  const torch::Tensor largest_logits = torch::tensor({30.0F, 400.0F, 90.0F, 100.0F}); // a head

  muon::qk_clip_(query->weight, key->weight, largest_logits); // after a step: MuonClip's projection
}

void functional_core() {
  const torch::Tensor x = torch::randn({4, 32, 16});
  muon::OrthogonalizeOptions options;
  options.schedule = muon::find_schedule("polar_express");
  const torch::Tensor u = muon::orthogonalize(x, options); // 4 matrices

  const Params params = {torch::randn({8, 4}), torch::randn({4, 4})};
  const Params grads = {torch::randn({8, 4}), torch::randn({4, 4})};
  const Params momenta = {torch::zeros({8, 4}), torch::zeros({4, 4})};
  const muon::MuonOptions group(2e-2);
  const muon::PlanHandle plan =
      muon::create_plan(params, /*groups=*/{0, 0}, {group.spec()}, {"first", "second"});
  torch::Tensor hyper = torch::empty({1, muon::Hyper::kCount}, torch::kDouble);
  group.write_hyper(hyper.mutable_data_ptr<double>());
  muon::step_(plan, params, grads, momenta, hyper);
  muon::free_plan(plan);
}

} // namespace

int main() {
  torch::manual_seed(0);
  whole_model();
  matrices_alone();
  own_groups();
  layouts();
  schedules();
  warm_up();
  loss_scaling();
  save_and_load();
  algorithm_of_our_own();
  clip_attention();
  functional_core();
}
