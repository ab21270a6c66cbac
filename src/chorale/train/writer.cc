#include "chorale/train/writer.h"

#include <algorithm>

#include "chorale/api/api.h"

namespace chorale::train {

std::string write_text(models::Gpt2& model, const Tokenizer& tokenizer, std::string_view prompt,
                       const WriteOptions& options) {
  std::string text;
  Utf8Pieces pieces;
  const auto put = [&](const std::string& piece) {
    text += piece;
    if (options.on_text && !piece.empty()) options.on_text(piece);
  };
  std::vector<int32_t> ids = tokenizer.encode(prompt.empty() ? "\n" : prompt);
  put(pieces.add(prompt));
  const int64_t context = model.config.n_positions;
  const Device device = model.parameters().front().device();
  for (int64_t left = options.tokens; left > 0;) {
    const auto known = std::min(static_cast<int64_t>(ids.size()), static_cast<int64_t>(ids.size()) < context
                                                                      ? static_cast<int64_t>(ids.size())
                                                                      : std::max<int64_t>(context / 2, 1));
    const std::vector<int64_t> seen(ids.end() - known, ids.end());
    const int64_t now = std::min(left, context - known);
    model.generate(to(Tensor::from(seen, {1, known}), device),
                   {.max_new_tokens = now,
                    .sampling = {.temperature = options.temperature,
                                 .top_k = options.top_k,
                                 .top_p = options.top_p,
                                 .generator = options.generator},
                    .on_token = [&](const Tensor& token) {
                      const auto id = static_cast<int32_t>(token.to_vector<int64_t>()[0]);
                      ids.push_back(id);
                      // A model may have more tokens than its tokenizer: rows that only
                      // fill it up.
                      if (id < tokenizer.size()) put(pieces.add(tokenizer.decode({&id, 1})));
                    }});
    left -= now;
  }
  put(pieces.finish());
  return text;
}

}  // namespace chorale::train
