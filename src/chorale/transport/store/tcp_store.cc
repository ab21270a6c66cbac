#include "chorale/transport/store/tcp_store.h"

#include <chrono>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/transport/store/store_table.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;

// A server that is alive answers a wait at the deadline with the names of the missing keys: that much longer we listen.
constexpr auto kGrace = 1s;

int64_t limit_ms(Deadline deadline) {
  if (deadline.end() == Deadline::Clock::time_point::max()) return -1;
  return std::chrono::ceil<std::chrono::milliseconds>(deadline.left()).count();
}

Deadline with_grace(Deadline deadline) {
  return deadline.end() == Deadline::Clock::time_point::max() ? deadline : Deadline(deadline.end() + kGrace);
}

// Checks the key before anything is sent, so that a wrong call costs no connection.
std::string checked(std::string_view key) {
  check_store_key(key);
  return std::string(key);
}

std::string checked_value(std::string_view key, std::string_view value) {
  check_store_value(key, value);
  return std::string(value);
}

}  // namespace

StoreWill::StoreWill(const Endpoint& server, const std::optional<Secret>& secret, const std::string& key,
                     const std::string& value, Deadline deadline)
    : channel_(ControlChannel::connect(server, secret, kStorePurpose, kMaxStoreMessageBytes, deadline)) {
  channel_.send(encode(StoreRequest{StoreCall::kWill, 0, {checked(key), checked_value(key, value)}}), deadline);
  const auto reply = decode_reply(channel_.receive(deadline));
  if (!reply || reply->status != StoreStatus::kOk)
    throw CommError(concat("[store] ", server.text(), " does not take '", key, "' for the end of this connection"));
}

TcpStore::TcpStore(Endpoint server, std::optional<Secret> secret, Deadline deadline)
    : server_(std::move(server)), secret_(std::move(secret)) {
  idle_.push_back(take_channel(deadline));
}

ControlChannel TcpStore::take_channel(Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      ControlChannel channel = std::move(idle_.back());
      idle_.pop_back();
      return channel;
    }
  }
  ControlChannel channel = ControlChannel::connect(server_, secret_, kStorePurpose, kMaxStoreMessageBytes, deadline);
  std::string id;
  try {
    channel.send(encode(StoreRequest{StoreCall::kWho, 0, {}}), deadline);
    const auto reply = decode_reply(channel.receive(deadline));
    if (reply && reply->words.size() == 1) id = reply->words.front();
  } catch (const CommError& error) {
    if (deadline.passed()) throw;
    throw StoreLost(concat("[store] ", error.what()));
  }
  if (id.empty())
    throw CommError(concat("[store] ", server_.text(), " does not say what it is; does it run another version?"));
  const std::lock_guard lock(mutex_);
  if (id_.empty()) id_ = id;
  if (id_ != id) throw StoreLost(concat("[store] ", server_.text(), " is another server by now"));
  return channel;
}

StoreReply TcpStore::call(std::string_view name, const StoreRequest& request, Deadline deadline) {
  CHORALE_CHECK_STATE(!made_.is_foreign(), "[store] ", name, ": this connection to ", server_.text(),
                      " belongs to the process that was forked; connect to the store anew");
  StoreReply reply;
  try {
    ControlChannel channel = take_channel(deadline);
    channel.send(encode(request), deadline);
    const std::string bytes = channel.receive(with_grace(deadline));
    auto decoded = decode_reply(bytes);
    if (!decoded) throw CommError(concat("[store] ", server_.text(), " sent something that is no reply"));
    reply = *std::move(decoded);
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(channel));
  } catch (const CommError& error) {
    const std::string text = concat(
        "[store] ", name, request.words.empty() ? "" : concat(" '", request.words.front(), "'"), ": ", error.what());
    if (deadline.passed()) throw CommError(text);
    throw StoreLost(text);
  }
  const std::string where = "the store at " + server_.text();
  if (reply.status == StoreStatus::kTimeout) throw_store_timeout(name, where, reply.words);
  CHORALE_CHECK(reply.status == StoreStatus::kOk, reply.words.empty() ? "[store] refused" : reply.words.front());
  // What the calls below read from it.
  const size_t words = request.call == StoreCall::kGet || request.call == StoreCall::kCompareSet ? 1 : 0;
  if (reply.words.size() < words) throw CommError(concat("[store] ", name, ": an answer without a value from ", where));
  return reply;
}

void TcpStore::set(std::string_view key, std::string_view value, Deadline deadline) {
  call("set", {StoreCall::kSet, 0, {checked(key), checked_value(key, value)}}, deadline);
}

std::string TcpStore::get(std::string_view key, Deadline deadline) {
  return std::move(call("get", {StoreCall::kGet, limit_ms(deadline), {checked(key)}}, deadline).words.front());
}

void TcpStore::wait(std::span<const std::string> keys, Deadline deadline) {
  for (const std::string& key : keys) check_store_key(key);
  call("wait", {StoreCall::kWait, limit_ms(deadline), {keys.begin(), keys.end()}}, deadline);
}

bool TcpStore::contains(std::string_view key, Deadline deadline) {
  return call("contains", {StoreCall::kContains, 0, {checked(key)}}, deadline).number != 0;
}

int64_t TcpStore::add(std::string_view key, int64_t delta, Deadline deadline) {
  return call("add", {StoreCall::kAdd, delta, {checked(key)}}, deadline).number;
}

std::string TcpStore::compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                                  Deadline deadline) {
  StoreRequest request{
      StoreCall::kCompareSet, 0, {checked(key), checked_value(key, expected), checked_value(key, desired)}};
  return std::move(call("compare_set", request, deadline).words.front());
}

bool TcpStore::remove(std::string_view key, Deadline deadline) {
  return call("remove", {StoreCall::kRemove, 0, {checked(key)}}, deadline).number != 0;
}

std::vector<std::string> TcpStore::keys(std::string_view prefix, Deadline deadline) {
  return call("keys", {StoreCall::kKeys, 0, {std::string(prefix)}}, deadline).words;
}

int64_t TcpStore::count(Deadline deadline) { return call("count", {StoreCall::kCount, 0, {}}, deadline).number; }

}  // namespace chorale::transport
