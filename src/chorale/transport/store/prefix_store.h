// A view of a store in which every key is put below a prefix: users of one store that cannot meet by accident.
#pragma once

#include <memory>
#include <string>

#include "chorale/transport/store/store.h"

namespace chorale::transport {

// The entry `key` of the view is `prefix/key` of the store. count() and keys() see the view's own entries only. Lengths
// are checked by the store, so a view leaves less room for a key.
class PrefixStore final : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store);

  void set(std::string_view key, std::string_view value, Deadline deadline) override;
  std::string get(std::string_view key, Deadline deadline) override;
  void wait(std::span<const std::string> keys, Deadline deadline) override;
  bool contains(std::string_view key, Deadline deadline) override;
  int64_t add(std::string_view key, int64_t delta, Deadline deadline) override;
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override;
  bool remove(std::string_view key, Deadline deadline) override;
  std::vector<std::string> keys(std::string_view prefix, Deadline deadline) override;
  int64_t count(Deadline deadline) override;

 private:
  std::string full(std::string_view key) const;

  const std::string prefix_;  // with its slash
  const std::shared_ptr<Store> store_;
};

}  // namespace chorale::transport
