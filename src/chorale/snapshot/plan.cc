#include "chorale/snapshot/plan.h"

#include <algorithm>
#include <numeric>

#include "chorale/base/error.h"

namespace chorale::snapshot {
namespace {

struct Copy {
  size_t rank, item;
};

// Equal regions of one key, in the order of ranks.
struct Candidates {
  const WriteItem* first;
  std::vector<Copy> copies;
};

}  // namespace

SavePlan plan_save(const std::vector<std::vector<WriteItem>>& items, const std::vector<bool>& writes) {
  SavePlan plan;
  plan.writes.resize(items.size());
  std::map<std::string, std::vector<Candidates>> by_key;
  std::map<std::string, size_t> first_rank;
  for (size_t rank = 0; rank < items.size(); ++rank) {
    for (size_t i = 0; i < items[rank].size(); ++i) {
      const WriteItem& item = items[rank][i];
      std::vector<Candidates>& regions = by_key[item.key];
      const size_t before = first_rank.emplace(item.key, rank).first->second;
      if (!regions.empty()) {
        const WriteItem& other = *regions.front().first;
        CHORALE_CHECK(item.is_bytes == other.is_bytes &&
                          (item.is_bytes || (item.dtype == other.dtype && item.whole == other.whole)),
                      "[checkpoint] ", item.key, " is ",
                      item.is_bytes ? "no tensor" : concat(item.dtype, " ", item.whole), " on rank ", rank, " and ",
                      other.is_bytes ? "no tensor" : concat(other.dtype, " ", other.whole), " on rank ", before,
                      "; give what is not one tensor different keys");
      }
      const auto same = std::find_if(regions.begin(), regions.end(), [&](const Candidates& c) {
        return item.is_bytes || c.first->region == item.region;
      });
      if (same == regions.end()) {
        regions.push_back({&item, {{rank, i}}});
        continue;
      }
      same->copies.push_back({rank, i});
      if (item.fingerprint != same->first->fingerprint && (plan.differing.empty() || plan.differing.back() != item.key))
        plan.differing.push_back(item.key);
    }
  }
  std::vector<int64_t> load(items.size());
  for (const auto& [key, regions] : by_key) {
    const WriteItem& one = *regions.front().first;
    if (!one.is_bytes) {
      std::vector<Region> parts;
      parts.reserve(regions.size());
      for (const Candidates& c : regions) parts.push_back(c.first->region);
      check_cover(concat("[checkpoint] ", key), one.whole, parts);
    }
    for (const Candidates& c : regions) {
      if (!one.is_bytes && c.first->region.volume() == 0) continue;
      std::vector<Copy> copies = c.copies;
      if (!writes.empty()) std::erase_if(copies, [&](const Copy& copy) { return !writes[copy.rank]; });
      if (copies.empty()) {
        plan.sent.push_back({c.copies.front().rank, c.copies.front().item});
        continue;
      }
      const Copy chosen = *std::min_element(copies.begin(), copies.end(),
                                            [&](const Copy& a, const Copy& b) { return load[a.rank] < load[b.rank]; });
      load[chosen.rank] += c.first->bytes();
      plan.writes[chosen.rank].push_back(chosen.item);
    }
  }
  for (auto& items_of_rank : plan.writes) std::sort(items_of_rank.begin(), items_of_rank.end());
  std::sort(plan.differing.begin(), plan.differing.end());
  plan.differing.erase(std::unique(plan.differing.begin(), plan.differing.end()), plan.differing.end());
  return plan;
}

std::vector<ReadItem> plan_read(const std::string& key, const SavedTensor& saved, const Shape& whole,
                                const Region& local) {
  CHORALE_CHECK(saved.sizes == whole, "[checkpoint] ", key, " was saved with shape ", saved.sizes,
                " and is to be loaded into one of shape ", whole);
  std::vector<ReadItem> items;
  for (size_t c = 0; c < saved.chunks.size(); ++c) {
    const Region& chunk = saved.chunks[c].region;
    const std::optional<Region> common = intersection(chunk, local);
    if (!common) continue;
    ReadItem item{c, *common, common->offsets, common->offsets};
    for (size_t d = 0; d < whole.size(); ++d) {
      item.in_saved[d] -= chunk.offsets[d];
      item.in_local[d] -= local.offsets[d];
    }
    items.push_back(std::move(item));
  }
  return items;
}

std::vector<std::vector<size_t>> balanced(const std::vector<int64_t>& bytes, size_t bins) {
  std::vector<size_t> order(bytes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return bytes[a] > bytes[b]; });
  std::vector<std::vector<size_t>> result(bins);
  std::vector<int64_t> load(bins);
  for (const size_t i : order) {
    const auto least = static_cast<size_t>(std::min_element(load.begin(), load.end()) - load.begin());
    load[least] += bytes[i];
    result[least].push_back(i);
  }
  return result;
}

}  // namespace chorale::snapshot
