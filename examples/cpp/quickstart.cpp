// Muon for a whole model: Muon for its matrices, AdamW for the rest, one learning rate.
#include <iostream>

#include <muon/muon.h>
#include <torch/torch.h>

int main() {
  namespace nn = torch::nn;
  nn::Sequential model(nn::Linear(16, 64), nn::ReLU(), nn::Linear(64, 16));
  muon::Muon optimizer(muon::group_parameters(*model), muon::MuonOptions(3e-3));
  std::cout << optimizer.describe() << '\n';

  const auto x = torch::randn({256, 16});
  for (int step = 0; step < 200; ++step) {
    const auto loss = torch::mse_loss(model->forward(x), x.flip(1));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
  }
}
