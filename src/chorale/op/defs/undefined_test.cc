// An undefined tensor, as an argument that must be there, of every function that is no row of its own name: what an
// accessor would say of it, deep inside, helps nobody.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "chorale/op/assignment.h"
#include "chorale/op/functions.h"
#include "chorale/testing/message_test_util.h"

namespace chorale {
namespace {

// The function is named by what is called; a row may add which form of it this is (scatter_fill, index_add_).
void expect_named(const std::string& argument, const std::string& call, const std::string& message) {
  std::string name = call.substr(0, call.find('('));
  if (name.ends_with('_')) name.pop_back();
  const std::regex expected("\\[" + name + "(_\\w*)?\\] " + argument + "( \\(input \\d\\))? is an undefined tensor.*");
  EXPECT_TRUE(std::regex_match(message, expected)) << call << ": " << message;
}

#define NAMES(argument, ...) expect_named(#argument, #__VA_ARGS__, message_of([&] { __VA_ARGS__; }))

TEST(Undefined, TensorsAreErrorsThatNameFunctionAndArgument) {
  const Tensor none, x = ones({2, 2});
  NAMES(x, conv1d(none, x, x));
  NAMES(weight, conv1d(x, none, x));
  NAMES(x, conv2d(none, x, x));
  NAMES(weight, conv2d(x, none, x));
  NAMES(x, conv3d(none, x, x));
  NAMES(weight, conv3d(x, none, x));
  NAMES(x, conv_transpose1d(none, x, x));
  NAMES(weight, conv_transpose1d(x, none, x));
  NAMES(x, conv_transpose2d(none, x, x));
  NAMES(weight, conv_transpose2d(x, none, x));
  NAMES(x, conv_transpose3d(none, x, x));
  NAMES(weight, conv_transpose3d(x, none, x));
  NAMES(x, empty_like(none));
  NAMES(x, full_like(none, 1));
  NAMES(x, zeros_like(none));
  NAMES(x, ones_like(none));
  NAMES(x, fill_(none, 1));
  NAMES(x, zero_(none));
  NAMES(indices, embedding(none, x));
  NAMES(table, embedding(x, none));
  NAMES(indices, embedding_bag(none, x, x));
  NAMES(table, embedding_bag(x, none, x));
  NAMES(offsets, embedding_bag(x, x, none));
  NAMES(indices, embedding_bag(none, x));
  NAMES(table, embedding_bag(x, none));
  NAMES(x, index_select(none, 1, x));
  NAMES(index, index_select(x, 1, none));
  NAMES(x, index_add(none, 1, x, x));
  NAMES(index, index_add(x, 1, none, x));
  NAMES(source, index_add(x, 1, x, none));
  NAMES(x, index_add_(none, 1, x, x));
  NAMES(index, index_add_(x, 1, none, x));
  NAMES(source, index_add_(x, 1, x, none));
  NAMES(x, index_copy(none, 1, x, x));
  NAMES(index, index_copy(x, 1, none, x));
  NAMES(source, index_copy(x, 1, x, none));
  NAMES(x, index_copy_(none, 1, x, x));
  NAMES(index, index_copy_(x, 1, none, x));
  NAMES(source, index_copy_(x, 1, x, none));
  NAMES(x, index_fill(none, 1, x, 1));
  NAMES(index, index_fill(x, 1, none, 1));
  NAMES(x, index_fill_(none, 1, x, 1));
  NAMES(index, index_fill_(x, 1, none, 1));
  NAMES(x, gather(none, 1, x));
  NAMES(index, gather(x, 1, none));
  NAMES(x, take_along_dim(none, x));
  NAMES(index, take_along_dim(x, none));
  NAMES(x, scatter(none, 1, x, x));
  NAMES(index, scatter(x, 1, none, x));
  NAMES(source, scatter(x, 1, x, none));
  NAMES(x, scatter_(none, 1, x, x));
  NAMES(index, scatter_(x, 1, none, x));
  NAMES(source, scatter_(x, 1, x, none));
  NAMES(x, scatter(none, 1, x, 1));
  NAMES(index, scatter(x, 1, none, 1));
  NAMES(x, scatter_(none, 1, x, 1));
  NAMES(index, scatter_(x, 1, none, 1));
  NAMES(x, scatter_add(none, 1, x, x));
  NAMES(index, scatter_add(x, 1, none, x));
  NAMES(source, scatter_add(x, 1, x, none));
  NAMES(x, scatter_add_(none, 1, x, x));
  NAMES(index, scatter_add_(x, 1, none, x));
  NAMES(source, scatter_add_(x, 1, x, none));
  NAMES(x, index(none, {}));
  NAMES(x, index_put(none, {}, x));
  NAMES(values, index_put(x, {}, none));
  NAMES(x, index_put_(none, {}, x));
  NAMES(values, index_put_(x, {}, none));
  NAMES(x, masked_select(none, x));
  NAMES(mask, masked_select(x, none));
  NAMES(x, masked_scatter(none, x, x));
  NAMES(mask, masked_scatter(x, none, x));
  NAMES(source, masked_scatter(x, x, none));
  NAMES(x, masked_fill(none, x, x));
  NAMES(mask, masked_fill(x, none, x));
  NAMES(value, masked_fill(x, x, none));
  NAMES(x, nonzero(none));
  NAMES(a, cholesky(none));
  NAMES(a, solve_triangular(none, x, false));
  NAMES(b, solve_triangular(x, none, false));
  NAMES(a, qr(none));
  NAMES(x, softmax(none));
  NAMES(x, log_softmax(none));
  NAMES(x, layer_norm(none, {0}, x, x));
  NAMES(x, rms_norm(none, {0}, x));
  NAMES(x, group_norm(none, 1, x, x));
  NAMES(x, instance_norm(none, x, x, x, x));
  NAMES(x, batch_norm(none, x, x, x, x));
  NAMES(x, max_pool1d(none, {0}));
  NAMES(x, max_pool2d(none, {0}));
  NAMES(x, max_pool1d_with_indices(none, {0}));
  NAMES(x, max_pool2d_with_indices(none, {0}));
  NAMES(x, avg_pool1d(none, {0}));
  NAMES(x, avg_pool2d(none, {0}));
  NAMES(x, adaptive_avg_pool1d(none, {0}));
  NAMES(x, adaptive_avg_pool2d(none, {0}));
  NAMES(x, adaptive_max_pool1d(none, {0}));
  NAMES(x, adaptive_max_pool2d(none, {0}));
  NAMES(x, adaptive_max_pool2d_with_indices(none, {0}));
  NAMES(x, cross_entropy(none, x, x));
  NAMES(target, cross_entropy(x, none, x));
  NAMES(x, nll_loss(none, x, x));
  NAMES(target, nll_loss(x, none, x));
  NAMES(x, mse_loss(none, x));
  NAMES(y, mse_loss(x, none));
  NAMES(x, l1_loss(none, x));
  NAMES(y, l1_loss(x, none));
  NAMES(x, smooth_l1_loss(none, x));
  NAMES(y, smooth_l1_loss(x, none));
  NAMES(x, huber_loss(none, x));
  NAMES(y, huber_loss(x, none));
  NAMES(x, binary_cross_entropy(none, x, x));
  NAMES(y, binary_cross_entropy(x, none, x));
  NAMES(x, binary_cross_entropy_with_logits(none, x, x));
  NAMES(y, binary_cross_entropy_with_logits(x, none, x));
  NAMES(x, kl_div(none, x));
  NAMES(target, kl_div(x, none));
  NAMES(x, cosine_similarity(none, x));
  NAMES(y, cosine_similarity(x, none));
  NAMES(x, dropout(none));
  NAMES(x, feature_dropout(none));
  NAMES(q, scaled_dot_product_attention(none, x, x));
  NAMES(k, scaled_dot_product_attention(x, none, x));
  NAMES(v, scaled_dot_product_attention(x, x, none));
  NAMES(x, sort(none));
  NAMES(x, argsort(none));
  NAMES(x, topk(none, 1));
  NAMES(x, unique(none));
  NAMES(boundaries, searchsorted(none, x));
  NAMES(values, searchsorted(x, none));
  NAMES(x, bincount(none, x));
  NAMES(condition, where(none, 1, x));
  NAMES(y, where(x, 1, none));
  NAMES(condition, where(none, x, 1));
  NAMES(x, where(x, none, 1));
  NAMES(x, imag(none));
  NAMES(x, conj(none));
  NAMES(x, angle(none));
  NAMES(an operand, einsum("ij,ij->ij", {none, x}));
  NAMES(a, matmul(none, x));
  NAMES(b, matmul(x, none));
  NAMES(a, mm(none, x));
  NAMES(b, mm(x, none));
  NAMES(a, bmm(none, x));
  NAMES(b, bmm(x, none));
  NAMES(c, addmm(none, x, x));
  NAMES(a, addmm(x, none, x));
  NAMES(b, addmm(x, x, none));
  NAMES(x, linear(none, x, x));
  NAMES(weight, linear(x, none, x));
  NAMES(a, dot(none, x));
  NAMES(b, dot(x, none));
  NAMES(a, outer(none, x));
  NAMES(b, outer(x, none));
  NAMES(p, bernoulli(none));
  NAMES(weights, multinomial(none, 1));
  NAMES(x, uniform_(none));
  NAMES(x, normal_(none));
  NAMES(x, sum(none));
  NAMES(x, prod(none));
  NAMES(x, mean(none));
  NAMES(x, amax(none));
  NAMES(x, amin(none));
  NAMES(x, max(none));
  NAMES(x, min(none));
  NAMES(x, max(none, 1));
  NAMES(x, min(none, 1));
  NAMES(x, argmax(none));
  NAMES(x, argmin(none));
  NAMES(x, any(none));
  NAMES(x, all(none));
  NAMES(x, count_nonzero(none));
  NAMES(x, norm(none));
  NAMES(x, var(none));
  NAMES(x, stddev(none));
  NAMES(x, logsumexp(none));
  NAMES(x, cumsum(none, 1));
  NAMES(x, cumprod(none, 1));
  NAMES(x, sum_to(none, {2, 2}));
  NAMES(xs, cat({none, x}));
  NAMES(xs, stack({none, x}));
  NAMES(x, repeat(none, {0}));
  NAMES(x, tile(none, {0}));
  NAMES(x, repeat_interleave(none, 1));
  NAMES(x, repeat_interleave(none, x));
  NAMES(repeats, repeat_interleave(x, none));
  NAMES(x, pad(none, {0}));
  NAMES(x, roll(none, {0}));
  NAMES(x, tril(none));
  NAMES(x, triu(none));
  NAMES(xs, meshgrid({none, x}));
  NAMES(index, one_hot(none));
  NAMES(x, coalesce(none));
  NAMES(x, to_dense(none));
  NAMES(x, sparse_add(none, x));
  NAMES(y, sparse_add(x, none));
  NAMES(dense, sparse_add_(none, x));
  NAMES(sparse, sparse_add_(x, none));
  NAMES(x, sparse_scale(none, 1));
  NAMES(x, slice(none, 1));
  NAMES(x, narrow(none, 1, 1, 1));
  NAMES(x, select(none, 1, 1));
  NAMES(x, split(none, 1));
  NAMES(x, split_sizes(none, {}));
  NAMES(x, chunk(none, 1));
  NAMES(x, unbind(none));
  NAMES(x, permute(none, {0}));
  NAMES(x, transpose(none, 1, 1));
  NAMES(x, swapdims(none, 1, 1));
  NAMES(x, t(none));
  NAMES(x, adjoint(none));
  NAMES(x, movedim(none, {0}, {0}));
  NAMES(x, expand(none, {0}));
  NAMES(x, broadcast_to(none, {0}));
  NAMES(x, expand_as(none, x));
  NAMES(like, expand_as(x, none));
  NAMES(x, view(none, {0}));
  NAMES(x, reshape(none, {0}));
  NAMES(x, flatten(none));
  NAMES(x, unflatten(none, 1, {0}));
  NAMES(x, squeeze(none));
  NAMES(x, squeeze(none, {0}));
  NAMES(x, unsqueeze(none, 1));
  NAMES(x, unfold(none, 1, 1, 1));
  NAMES(x, diagonal(none));
  NAMES(x, as_strided(none, {0}, {0}));
  NAMES(x, flip(none, {0}));
}

#undef NAMES

}  // namespace
}  // namespace chorale
