#include "chorale/transport/fabric/control_channel.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/base/log.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;

// A server that goes, or one that is flooded by strangers, may close a connection in the middle of the handshake; the
// next attempt then finds another. A server that has seen the proof and closes does not believe it, most likely: that
// does not get better; but a flood can hit that moment, too, so it gets some more tries.
constexpr auto kHandshakeTime = 4s, kFirstWord = 4s;
constexpr auto kRetryPause = 20ms;
constexpr int kMostRefusals = 10;

std::string receive_bytes(Socket& socket, size_t bytes, Deadline deadline) {
  std::string text(bytes, '\0');
  socket.receive(text, deadline);
  return text;
}

void check_secret(const Endpoint& endpoint, const std::optional<Secret>& secret) {
  CHORALE_CHECK(secret || endpoint.is_unix(), "[handshake] a connection to ", endpoint.text(),
                " needs the job's secret: set CHORALE_SECRET_FILE on every node, or start the ranks with chorale run");
}

}  // namespace

std::string message_header(MessageMac& mac, std::string_view message) {
  const auto bytes = static_cast<uint32_t>(message.size());
  return std::string(reinterpret_cast<const char*>(&bytes), sizeof bytes) + mac.next(message);
}

uint32_t message_bytes(std::string_view header) {
  uint32_t bytes = 0;
  std::memcpy(&bytes, header.data(), sizeof bytes);
  return bytes;
}

ControlChannel::ControlChannel(Socket socket, SessionMacs macs, size_t max_message_bytes)
    : socket_(std::move(socket)), macs_(macs), max_message_bytes_(max_message_bytes) {}

ControlChannel ControlChannel::connect(const Endpoint& endpoint, const std::optional<Secret>& secret,
                                       std::string_view purpose, size_t max_message_bytes, Deadline deadline) {
  check_secret(endpoint, secret);
  const auto start = Deadline::Clock::now();
  Deadline::Clock::duration next_word = kFirstWord;
  for (int refusals = 0;;) {
    Socket socket = connect_to(endpoint, deadline);
    std::string problem;
    try {
      ClientHandshake handshake(secret, purpose);
      const Deadline limit = deadline.earlier(within(kHandshakeTime));
      socket.send(handshake.hello(), limit);
      const std::string proof = handshake.answer(receive_bytes(socket, kChallengeBytes, limit));
      ++refusals;  // unless it is accepted
      socket.send(proof, limit);
      const SessionMacs macs = handshake.finish(receive_bytes(socket, kProofBytes, limit));
      return {std::move(socket), macs, max_message_bytes};
    } catch (const CommError& error) {
      problem = concat(error.what(), "; the handshake with ", endpoint.text(),
                       " failed: is it a server of this job, and has this rank the same secret "
                       "(CHORALE_SECRET_FILE)?");
    }
    if (deadline.passed() || refusals == kMostRefusals) throw CommError(problem);
    if (Deadline::Clock::now() - start >= next_word) {
      log_info(concat(problem, " Tries again."));
      next_word *= 4;
    }
    std::this_thread::sleep_for(std::min<Deadline::Clock::duration>(kRetryPause, deadline.left()));
  }
}

ControlChannel ControlChannel::accept(Socket socket, const std::optional<Secret>& secret, std::string_view purpose,
                                      size_t max_message_bytes, Deadline deadline) {
  check_secret(endpoint_of(socket), secret);
  try {
    ServerHandshake handshake(secret, purpose);
    socket.send(handshake.challenge(receive_bytes(socket, kHelloBytes, deadline)), deadline);
    socket.send(handshake.answer(receive_bytes(socket, kProofBytes, deadline)), deadline);
    return {std::move(socket), handshake.macs(), max_message_bytes};
  } catch (const CommError& error) {
    throw CommError(concat("refused ", socket.peer(), ": ", error.what()));
  }
}

void ControlChannel::send(std::string_view message, Deadline deadline) {
  CHORALE_CHECK(message.size() <= max_message_bytes_, "[channel] a message of ", message.size(), " bytes to ", peer(),
                "; at most ", max_message_bytes_);
  socket_.send(message_header(macs_.sending, message).append(message), deadline);
}

std::string ControlChannel::receive(Deadline deadline) {
  const std::string header = receive_bytes(socket_, kMessageHeaderBytes, deadline);
  const uint32_t bytes = message_bytes(header);
  if (bytes > max_message_bytes_) {
    throw CommError(concat("[channel] ", peer(), " announces ", bytes, " bytes; at most ", max_message_bytes_));
  }
  std::string message = receive_bytes(socket_, bytes, deadline);
  if (!macs_.receiving.check_next(message, message_mac(header))) {
    throw CommError(concat("[channel] a message of ", peer(), " was changed on its way"));
  }
  return message;
}

}  // namespace chorale::transport
