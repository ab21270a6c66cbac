// Loads a GPT-2 from a folder as Hugging Face's libraries write them (config.json, model.safetensors), goes on training
// it on a text, and saves it where those libraries can load it again.
//
//   fine_tune_gpt2 FROM TO TEXT-FILE     tokens are bytes
//   fine_tune_gpt2                       with a small model and a text of its own
#include <filesystem>
#include <iostream>

#include "chorale/chorale.h"

using namespace chorale;
namespace fs = std::filesystem;

namespace {

// The mean loss of the last ten steps.
double fine_tune(models::Gpt2& model, const std::string& text, int steps) {
  model.train();
  const int64_t window = std::min<int64_t>(model.config.n_positions, 64);
  data::TokenWindows windows(text::Bytes::encode(text), window, window / 4);
  data::DataLoader loader(windows, {.batch_size = 8, .shuffle = true, .drop_last = true});
  optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-3});
  double recent = 0;
  for (int step = 0; step < steps;) {
    for (const auto& [x, y] : loader) {
      if (step == steps) break;
      optimizer.zero_grad();
      const Tensor logits = model(x);
      const Tensor loss = cross_entropy(flatten(logits, 0, 1), flatten(y));
      backward(loss);
      optim::clip_grad_norm(optimizer.parameters(), 1.0);
      optimizer.step();
      if (steps - step <= 10) recent += loss.item<double>() / 10;
      if (++step % 20 == 0) std::cout << "step " << step << ": loss " << loss << "\n";
    }
  }
  return recent;
}

std::string continued(models::Gpt2& model, const std::string& prompt) {
  const NoGrad scope;
  model.eval();
  const auto ids = text::Bytes::encode(prompt);
  const Tensor start = to(Tensor::from(ids, {1, static_cast<int64_t>(ids.size())}), DType::kI64);
  return text::Bytes::decode(model.generate(start, {.max_new_tokens = 24}).to_vector<int32_t>());
}

}  // namespace

int main(int argc, char** argv) {
  const bool own = argc != 4;
  const fs::path folder = fs::temp_directory_path() / "chorale-example-gpt2";
  const fs::path from = own ? folder / "from" : argv[1], to = own ? folder / "to" : argv[2];
  std::string text;
  if (own) {
    models::save_gpt2(from,
                      models::Gpt2({.vocab_size = 256, .n_positions = 64, .n_embd = 64, .n_layer = 2, .n_head = 4}));
    for (int i = 0; i < 100; ++i) text += "the quick brown fox jumps over the lazy dog. ";
  } else {
    text = io::MappedFile::open(argv[3])->text();
  }
  models::Gpt2 model = models::load_gpt2(from);
  const double loss = fine_tune(model, text, own ? 80 : 1000);
  models::save_gpt2(to, model);
  models::Gpt2 saved = models::load_gpt2(to);
  std::cout << continued(saved, text.substr(0, 10)) << "\n";
  if (own) fs::remove_all(folder);
  return own && loss > 1 ? 1 : 0;
}
