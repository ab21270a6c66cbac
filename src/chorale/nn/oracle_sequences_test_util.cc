// Recurrent layers, attention and losses.
#include "chorale/nn/nn.h"
#include "chorale/nn/oracle_cases_test_util.h"

namespace chorale::nn::oracle {
namespace {

using In = std::vector<Tensor>;

// Where the inputs are.
AttentionMasks masks(const In& in, bool attention, bool padding, bool weights = false) {
  const Device device = in[0].device();
  AttentionMasks result{.need_weights = weights};
  const Tensor places = arange(4, DType::kI64, device);
  if (attention) result.attn_mask = gt(places, unsqueeze(places, 1));
  if (padding)
    result.key_padding_mask = Tensor::from({false, false, false, false, false, false, true, true}, {2, 4}, device);
  return result;
}
constexpr TransformerLayerOptions kSmall{.dim_feedforward = 10, .dropout = 0};

void add_attentions(Cases& cases) {
  cases["MultiheadAttention"] = CHORALE_CASE(
      MultiheadAttention(6, 2), {x({4, 2, 6})},
      [](MultiheadAttention& m, const In& in) { return m(in[0], in[0], in[0], AttentionMasks{.need_weights = true}); });
  cases["MultiheadAttention_fast"] =
      CHORALE_CASE(MultiheadAttention(6, 2), {x({4, 2, 6})},
                   [](MultiheadAttention& m, const In& in) { return m(in[0], in[0], in[0]); });
  cases["MultiheadAttention_cross"] =
      CHORALE_CASE(MultiheadAttention(6, 3, {.kdim = 5, .vdim = 7, .batch_first = true}),
                   {x({2, 3, 6}), x({2, 4, 5}), x({2, 4, 7})}, [](MultiheadAttention& m, const In& in) {
                     const Tensor slope = view(arange(12, DType::kF64, in[0].device()), {3, 4}) * -0.1;
                     return m(in[0], in[1], in[2], AttentionMasks{.attn_mask = slope});
                   });
  cases["MultiheadAttention_masks"] = CHORALE_CASE(
      MultiheadAttention(6, 2, {.bias = false, .batch_first = true}), {x({2, 4, 6})},
      [](MultiheadAttention& m, const In& in) { return m(in[0], in[0], in[0], masks(in, true, true, true)); });
  cases["MultiheadAttention_causal"] = CHORALE_CASE(
      MultiheadAttention(6, 2, {.batch_first = true}), {x({2, 4, 6})},
      [](MultiheadAttention& m, const In& in) { return m(in[0], in[0], in[0], AttentionMasks{.is_causal = true}); });
  cases["MultiheadAttention_no_batch"] = CHORALE_CASE(
      MultiheadAttention(6, 2), {x({3, 6}), x({4, 6})},
      [](MultiheadAttention& m, const In& in) { return m(in[0], in[1], in[1], AttentionMasks{.need_weights = true}); });
  cases["TransformerEncoderLayer"] = CHORALE_CASE(TransformerEncoderLayer(6, 2, kSmall), {x({4, 2, 6})});
  cases["TransformerEncoderLayer_pre"] = CHORALE_CASE(
      TransformerEncoderLayer(6, 2,
                              {.dim_feedforward = 10,
                               .dropout = 0,
                               .activation = TransformerActivation::kGelu,
                               .batch_first = true,
                               .norm_first = true}),
      {x({2, 4, 6})}, [](TransformerEncoderLayer& m, const In& in) { return m(in[0], masks(in, true, true)); });
  cases["TransformerEncoderLayer_no_bias"] =
      CHORALE_CASE(TransformerEncoderLayer(6, 2, {.dim_feedforward = 10, .dropout = 0, .bias = false}), {x({4, 2, 6})});
  cases["TransformerDecoderLayer"] =
      CHORALE_CASE(TransformerDecoderLayer(6, 2, {.dim_feedforward = 10, .dropout = 0, .batch_first = true}),
                   {x({2, 4, 6}), x({2, 4, 6})}, [](TransformerDecoderLayer& m, const In& in) {
                     return m(in[0], in[1], AttentionMasks{.is_causal = true}, masks(in, false, true));
                   });
  cases["TransformerDecoderLayer_pre"] =
      CHORALE_CASE(TransformerDecoderLayer(6, 2, {.dim_feedforward = 10, .dropout = 0, .norm_first = true}),
                   {x({4, 2, 6}), x({3, 2, 6})});
}

void add_recurrents(Cases& cases) {
  cases["RNN"] = CHORALE_CASE(RNN(3, 4), {x({5, 2, 3})});
  cases["RNN_relu"] = CHORALE_CASE(RNN(3, 4, {.bias = false}, RnnNonlinearity::kRelu), {x({5, 2, 3}), x({1, 2, 4})});
  cases["RNN_deep"] = CHORALE_CASE(RNN(3, 4, {.num_layers = 2, .batch_first = true, .bidirectional = true}),
                                   {x({2, 5, 3}), x({4, 2, 4})});
  cases["GRU"] = CHORALE_CASE(GRU(3, 4), {x({5, 2, 3})});
  cases["GRU_deep"] = CHORALE_CASE(GRU(3, 4, {.num_layers = 2, .bidirectional = true}), {x({5, 2, 3}), x({4, 2, 4})});
  cases["GRU_no_batch"] = CHORALE_CASE(GRU(3, 4, {.bias = false}), {x({5, 3}), x({1, 4})});
  cases["LSTM"] = CHORALE_CASE(LSTM(3, 4), {x({5, 2, 3})});
  cases["LSTM_deep"] = CHORALE_CASE(LSTM(3, 4, {.num_layers = 2, .batch_first = true, .bidirectional = true}),
                                    {x({2, 5, 3}), x({4, 2, 4}), x({4, 2, 4})}, [](LSTM& m, const In& in) {
                                      return m(in[0], LstmState{in[1], in[2]});
                                    });
  cases["LSTM_no_batch"] = CHORALE_CASE(LSTM(3, 4, {.num_layers = 2, .bias = false}), {x({5, 3})});
}

}  // namespace

Cases sequence_cases() {
  Cases cases;
  add_attentions(cases);
  add_recurrents(cases);
  return cases;
}

Cases loss_cases() {
  const Input classes = fixed(Tensor::from({1L, 0L, 3L, 1L}, {4}));
  const Input signs = fixed(Tensor::from({1.0, -1.0, 1.0, -1.0}, {4}));
  const Input bits = fixed(Tensor::from({0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0}, {3, 4}));
  Cases cases;
  cases["CrossEntropyLoss"] = CHORALE_CASE(CrossEntropyLoss(), {x({4, 5}), classes});
  cases["CrossEntropyLoss_weighted"] = CHORALE_CASE(
      CrossEntropyLoss({.weight = ones({5}), .ignore_index = 1, .label_smoothing = 0.1}), {x({4, 5}), classes});
  cases["CrossEntropyLoss_none"] =
      CHORALE_CASE(CrossEntropyLoss({.reduction = Reduction::kNone}), {x({2, 3, 4}), ints({2, 4}, 0, 3)});
  cases["NLLLoss"] = CHORALE_CASE(NLLLoss({.weight = ones({5}), .reduction = Reduction::kSum}), {x({4, 5}), classes});
  cases["MSELoss"] = CHORALE_CASE(MSELoss(), {x({3, 4}), x({3, 4})});
  cases["MSELoss_none"] = CHORALE_CASE(MSELoss(Reduction::kNone), {x({3, 4}), x({3, 4})});
  cases["L1Loss"] = CHORALE_CASE(L1Loss(Reduction::kSum), {x({3, 4}), x({3, 4})});
  cases["SmoothL1Loss"] = CHORALE_CASE(SmoothL1Loss({.beta = 0.5}), {x({3, 4}), x({3, 4})});
  cases["HuberLoss"] = CHORALE_CASE(HuberLoss({.delta = 0.5}), {x({3, 4}), x({3, 4})});
  cases["BCELoss"] = CHORALE_CASE(BCELoss({.weight = ones({4})}), {x({3, 4}, 0.1, 0.9), bits});
  cases["BCEWithLogitsLoss"] =
      CHORALE_CASE(BCEWithLogitsLoss({.weight = ones({4}), .pos_weight = ones({4})}), {x({3, 4}), bits});
  cases["KLDivLoss"] =
      CHORALE_CASE(KLDivLoss({.reduction = KlReduction::kBatchMean}), {x({3, 4}), x({3, 4}, 0.1, 0.9)});
  cases["KLDivLoss_log"] =
      CHORALE_CASE(KLDivLoss({.reduction = KlReduction::kSum, .log_target = true}), {x({3, 4}), x({3, 4})});
  cases["CosineSimilarity"] = CHORALE_CASE(CosineSimilarity(-1), {x({3, 4}), x({3, 4})});
  cases["CosineEmbeddingLoss"] = CHORALE_CASE(CosineEmbeddingLoss({.margin = 0.1}), {x({4, 5}), x({4, 5}), signs});
  cases["MarginRankingLoss"] = CHORALE_CASE(MarginRankingLoss({.margin = 0.2}), {x({4}), x({4}), signs});
  cases["HingeEmbeddingLoss"] =
      CHORALE_CASE(HingeEmbeddingLoss({.margin = 0.4, .reduction = Reduction::kSum}), {x({4}), signs});
  cases["TripletMarginLoss"] = CHORALE_CASE(TripletMarginLoss({.margin = 0.7}), {x({4, 3}), x({4, 3}), x({4, 3})});
  return cases;
}

}  // namespace chorale::nn::oracle
