// Checkpoints that travel: loads a GPT-2 or BERT of Hugging Face's libraries, shows what it thinks of some tokens, and
// saves it where those libraries can load it again.
//
//   checkpoints gpt2|bert FROM TO TOKEN...     prints a line of logits for each token
//   checkpoints                                does the same with a small model of its own
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "chorale/api/api.h"
#include "chorale/models/checkpoint.h"

using namespace chorale;

namespace {

Tensor logits_of(models::Gpt2& model, const Tensor& ids) { return model(ids); }
Tensor logits_of(models::BertForMaskedLM& model, const Tensor& ids) {
  return model(models::BertInput{.input_ids = ids});
}

void print_rows(const Tensor& logits) {
  std::cout.precision(9);
  for (const Tensor& row : unbind(select(logits, 0, 0))) {
    for (const float value : row.to_vector<float>()) std::cout << value << ' ';
    std::cout << '\n';
  }
}

int demonstrate() {
  const auto folder = std::filesystem::temp_directory_path() / "chorale-example-checkpoint";
  models::Gpt2 model({.vocab_size = 100, .n_positions = 16, .n_embd = 32, .n_layer = 2, .n_head = 4});
  model.eval();
  models::save_gpt2(folder, model);
  models::Gpt2 loaded = models::load_gpt2(folder);
  std::filesystem::remove_all(folder);
  const Tensor ids = Tensor::from({1L, 2L, 3L}, {1, 3});
  const double difference = max(abs(sub(model(ids), loaded(ids)))).item<double>();
  std::cout << "saved and loaded " << model.parameter_count() << " parameters; logits differ by " << difference << '\n';
  return difference == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const NoGrad scope;
  if (argc == 1) return demonstrate();
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() < 4 || (words[0] != "gpt2" && words[0] != "bert")) {
    std::cerr << "usage: checkpoints gpt2|bert FROM TO TOKEN...\n";
    return 2;
  }
  std::vector<int64_t> tokens;
  for (size_t i = 3; i < words.size(); ++i) tokens.push_back(std::stoll(words[i]));
  const Tensor ids = Tensor::from(tokens, {1, static_cast<int64_t>(tokens.size())});
  constexpr size_t kSmallShards = 200'000;
  if (words[0] == "gpt2") {
    models::Gpt2 model = models::load_gpt2(words[1]);
    print_rows(logits_of(model, ids));
    models::save_gpt2(words[2], model, kSmallShards);
  } else {
    models::BertForMaskedLM model = models::load_bert(words[1]);
    print_rows(logits_of(model, ids));
    models::save_bert(words[2], model, kSmallShards);
  }
}
