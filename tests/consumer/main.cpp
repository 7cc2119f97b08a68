// Trains XOR with the installed libmuon, saves model and optimizer, and checks
// that the loaded pair continues as the original does.
#include <cstdio>
#include <vector>

#include <torch/torch.h>

#include <muon/muon.h>

namespace {

torch::nn::Sequential make_model() {
  return torch::nn::Sequential(
      torch::nn::Linear(2, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1), torch::nn::Sigmoid());
}

muon::Muon make_optimizer(const torch::nn::Sequential& model) {
  std::vector<torch::Tensor> weights;
  std::vector<torch::Tensor> biases;
  for (const torch::Tensor& parameter : model->parameters()) {
    (parameter.dim() == 2 ? weights : biases).push_back(parameter);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(weights, std::make_unique<muon::MuonOptions>(0.05));
  groups.emplace_back(
      biases, std::make_unique<muon::MuonOptions>(muon::MuonOptions(0.02).algorithm("adamw")));
  return muon::Muon(groups, muon::MuonOptions().weight_decay(0.0));
}

float train(torch::nn::Sequential& model, muon::Muon& optimizer, int steps) {
  const auto inputs = torch::tensor({{0.0F, 0.0F}, {0.0F, 1.0F}, {1.0F, 0.0F}, {1.0F, 1.0F}});
  const auto targets = torch::tensor({{0.0F}, {1.0F}, {1.0F}, {0.0F}});
  float loss = 0;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    auto error = torch::binary_cross_entropy(model->forward(inputs), targets);
    error.backward();
    optimizer.step();
    loss = error.item<float>();
  }
  return loss;
}

} // namespace

int main() {
  torch::manual_seed(1);
  auto model = make_model();
  muon::Muon optimizer = make_optimizer(model);
  const float first = train(model, optimizer, 1);
  const float last = train(model, optimizer, 200);
  std::printf("loss %.4f -> %.4f\n", static_cast<double>(first), static_cast<double>(last));
  if (!(last < 0.05F)) {
    std::puts("FAILED: XOR was not learned");
    return 1;
  }

  torch::save(model, "model.pt");
  torch::save(optimizer, "optimizer.pt");
  auto loaded_model = make_model();
  torch::load(loaded_model, "model.pt");
  muon::Muon loaded_optimizer = make_optimizer(loaded_model);
  torch::load(loaded_optimizer, "optimizer.pt");

  const float expected = train(model, optimizer, 5);
  const float continued = train(loaded_model, loaded_optimizer, 5);
  if (expected != continued) {
    std::printf(
        "FAILED: loss after load %.9g, without %.9g\n", static_cast<double>(continued),
        static_cast<double>(expected));
    return 1;
  }
  std::puts("saved and loaded: the run continues bit for bit");
  return 0;
}
