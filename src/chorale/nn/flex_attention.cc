#include "chorale/nn/flex_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/op/need_defined.h"

namespace chorale {
namespace {

// Keys [begin, end), and whether all scores of them are needed as they are.
struct Keys {
  int64_t begin, end;
  bool is_full;
};

Tensor numbers(int64_t begin, int64_t end, int64_t dim, Device device) {
  Shape sizes{1, 1, 1, 1};
  sizes[static_cast<size_t>(dim)] = end - begin;
  return reshape(arange(begin, end, 1, DType::kI64, device), sizes);
}

// The stretches of keys that a row of tiles needs in any batch and head; neighbours of a kind are one.
std::vector<Keys> keys_of_row(const BlockMask& mask, int64_t row, int64_t keys) {
  const int64_t columns = mask.tile_columns(), rows = mask.tile_rows();
  std::vector<int64_t> partial(static_cast<size_t>(columns), 0), full(static_cast<size_t>(columns), 0);
  const int64_t parts = mask.batch * mask.heads;
  for (int64_t part = 0; part < parts; ++part) {
    const auto at = static_cast<size_t>(part * rows + row);
    for (const int64_t column : mask.partial[at]) ++partial[static_cast<size_t>(column)];
    for (const int64_t column : mask.full[at]) ++full[static_cast<size_t>(column)];
  }
  std::vector<Keys> all;
  for (int64_t column = 0; column < columns; ++column) {
    const auto at = static_cast<size_t>(column);
    if (partial[at] + full[at] == 0) continue;
    const Keys now{column * mask.tile, std::min((column + 1) * mask.tile, keys), full[at] == parts};
    if (now.begin >= now.end) continue;
    if (!all.empty() && all.back().end == now.begin && all.back().is_full == now.is_full) {
      all.back().end = now.end;
    } else {
      all.push_back(now);
    }
  }
  return all;
}

Tensor join(const std::vector<Tensor>& parts, int64_t dim) { return parts.size() == 1 ? parts[0] : cat(parts, dim); }

struct Attention {
  Tensor q, k, v;
  const FlexOptions& options;
  double scale;
  bool wants_sums;

  // One stretch of scores, masked where it has to be.
  Tensor scores(const Tensor& rows, int64_t first_row, const Keys& keys) const {
    const Device device = q.device();
    const FlexPlace at{numbers(0, q.size(0), 0, device), numbers(0, q.size(1), 1, device),
                       numbers(first_row, first_row + rows.size(2), 2, device),
                       numbers(keys.begin, keys.end, 3, device)};
    const bool is_all = keys.begin == 0 && keys.end == k.size(2);
    Tensor score = matmul(rows, transpose(is_all ? k : slice(k, 2, keys.begin, keys.end), 2, 3)) * scale;
    if (options.score) score = options.score(score, at);
    if (!options.mask || keys.is_full) return score;
    return where(options.mask->mask(at), score, -std::numeric_limits<double>::infinity());
  }

  FlexResult rows(int64_t first, int64_t end, const std::vector<Keys>& stretches) const {
    const Tensor rows = first == 0 && end == q.size(2) ? q : slice(q, 2, first, end);
    if (stretches.empty()) {
      const Shape lines{q.size(0), q.size(1), end - first};
      Shape sizes = lines;
      sizes.push_back(v.size(3));
      return {zeros(sizes, v.dtype(), v.device()),
              full(lines, -std::numeric_limits<double>::infinity(), q.dtype(), q.device())};
    }
    std::vector<Tensor> parts, values;
    bool is_masked = false;
    for (const Keys& keys : stretches) {
      parts.push_back(scores(rows, first, keys));
      const bool is_all = keys.begin == 0 && keys.end == v.size(2);
      values.push_back(is_all ? v : slice(v, 2, keys.begin, keys.end));
      is_masked |= options.mask && !keys.is_full;
    }
    const Tensor score = join(parts, 3);
    Tensor weights = softmax(score, 3);
    // A query that may look nowhere has no sum to be divided by.
    if (is_masked) weights = where(eq(score, -std::numeric_limits<double>::infinity()), 0, weights);
    return {matmul(weights, join(values, 2)), wants_sums ? logsumexp(score, {3}) : Tensor{}};
  }
};

void check(const Tensor& q, const Tensor& k, const Tensor& v, const FlexOptions& options) {
  CHORALE_CHECK(q.dims() == 4 && k.dims() == 4 && v.dims() == 4,
                "[flex_attention] takes q, k and v of four dimensions [batch, heads, length, features], found ",
                q.sizes(), ", ", k.sizes(), " and ", v.sizes());
  CHORALE_CHECK(k.size(0) == q.size(0) && v.size(0) == q.size(0) && k.size(3) == q.size(3) && v.size(2) == k.size(2) &&
                    v.size(1) == k.size(1),
                "[flex_attention] q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(), " do not fit together");
  CHORALE_CHECK(options.grouped_query ? k.size(1) > 0 && q.size(1) % k.size(1) == 0 : q.size(1) == k.size(1),
                "[flex_attention] ", q.size(1), " heads of queries and ", k.size(1), " of keys",
                options.grouped_query ? ": the first must be a multiple of the second" : "; set grouped_query?");
  if (!options.mask) return;
  const BlockMask& mask = *options.mask;
  CHORALE_CHECK(mask.queries >= q.size(2) && mask.keys >= k.size(2), "[flex_attention] the mask was made for ",
                mask.queries, " queries and ", mask.keys, " keys, not for ", q.size(2), " and ", k.size(2),
                "; make one for these lengths");
  CHORALE_CHECK((mask.batch == 1 || mask.batch == q.size(0)) && (mask.heads == 1 || mask.heads == q.size(1)),
                "[flex_attention] the mask was made for ", mask.batch, " batches of ", mask.heads, " heads, not for ",
                q.size(0), " of ", q.size(1));
}

FlexResult attend(const Tensor& q, const Tensor& k, const Tensor& v, const FlexOptions& options, bool wants_sums) {
  check(q, k, v, options);
  const int64_t groups = k.size(1) == 0 ? 1 : q.size(1) / k.size(1);
  const auto for_each_head = [&](const Tensor& x) { return groups == 1 ? x : repeat_interleave(x, groups, 1); };
  const Attention attention{q,
                            for_each_head(k),
                            for_each_head(v),
                            options,
                            options.scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3)))),
                            wants_sums};
  if (!options.mask || q.size(2) == 0) return attention.rows(0, q.size(2), {{0, k.size(2), true}});
  std::vector<Tensor> outputs, sums;
  const BlockMask& mask = *options.mask;
  for (int64_t row = 0; row * mask.tile < q.size(2); ++row) {
    const FlexResult made =
        attention.rows(row * mask.tile, std::min((row + 1) * mask.tile, q.size(2)), keys_of_row(mask, row, k.size(2)));
    outputs.push_back(made.output);
    sums.push_back(made.log_sum_exp);
  }
  return {join(outputs, 2), wants_sums ? join(sums, 2) : Tensor{}};
}

}  // namespace

std::vector<std::vector<int64_t>> BlockMask::by_column(const std::vector<std::vector<int64_t>>& rows) const {
  std::vector<std::vector<int64_t>> columns(static_cast<size_t>(batch * heads * tile_columns()));
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t part = static_cast<int64_t>(i) / tile_rows(), row = static_cast<int64_t>(i) % tile_rows();
    for (const int64_t column : rows[i]) columns[static_cast<size_t>(part * tile_columns() + column)].push_back(row);
  }
  return columns;
}

BlockMask block_mask(const FlexMask& mask, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t tile) {
  CHORALE_CHECK(batch > 0 && heads > 0 && queries > 0 && keys > 0 && tile > 0, "[block_mask] ", batch, " batches, ",
                heads, " heads, ", queries, " queries, ", keys, " keys and tiles of ", tile,
                ": each must be at least 1");
  BlockMask made{mask, batch, heads, queries, keys, tile, {}, {}};
  const NoGrad quiet;
  const Tensor of_batch = numbers(0, batch, 0, kCpu), of_head = numbers(0, heads, 1, kCpu);
  made.partial.resize(static_cast<size_t>(batch * heads * made.tile_rows()));
  made.full.resize(made.partial.size());
  for (int64_t row = 0; row < made.tile_rows(); ++row) {
    for (int64_t column = 0; column < made.tile_columns(); ++column) {
      const int64_t q_end = std::min((row + 1) * tile, queries), k_end = std::min((column + 1) * tile, keys);
      const FlexPlace at{of_batch, of_head, numbers(row * tile, q_end, 2, kCpu),
                         numbers(column * tile, k_end, 3, kCpu)};
      const Tensor seen = expand(mask(at), {batch, heads, q_end - row * tile, k_end - column * tile});
      const auto some = any(seen, {2, 3}).to_vector<bool>(), whole = all(seen, {2, 3}).to_vector<bool>();
      for (size_t part = 0; part < some.size(); ++part) {
        const size_t place = part * static_cast<size_t>(made.tile_rows()) + static_cast<size_t>(row);
        if (some[part]) (whole[part] ? made.full : made.partial)[place].push_back(column);
      }
    }
  }
  return made;
}

FlexResult flex_attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, const FlexOptions& options) {
  op::need_defined("flex_attention_with_lse", "q", q);
  op::need_defined("flex_attention_with_lse", "k", k);
  op::need_defined("flex_attention_with_lse", "v", v);
  return attend(q, k, v, options, true);
}

Tensor flex_attention(const Tensor& q, const Tensor& k, const Tensor& v, const FlexOptions& options) {
  op::need_defined("flex_attention", "q", q);
  op::need_defined("flex_attention", "k", k);
  op::need_defined("flex_attention", "v", v);
  return attend(q, k, v, options, false).output;
}

}  // namespace chorale
