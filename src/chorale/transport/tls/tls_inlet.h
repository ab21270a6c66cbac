// A connection on which this rank only reads.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "chorale/transport/fabric/frame.h"
#include "chorale/transport/fabric/message.h"
#include "chorale/transport/io_loop.h"
#include "chorale/transport/tls/tls_stream.h"

namespace chorale::transport {

// It belongs to the loop's thread, except where it says otherwise.
class TlsInlet final : public IoLoop::Handler {
 public:
  class Receiver {
   public:
    // A frame has come. Returns the message to which its body belongs, if it has one. Throws InvalidArgument when no
    // peer of ours would send it.
    virtual MessagePtr on_frame(int peer, const Frame& frame) = 0;
    // The whole body is where message.to said, at the frame's offset.
    virtual void on_body(int peer, const Frame& frame, const MessagePtr& message) = 0;
    virtual void on_end(int peer, const std::string& why) = 0;
    // What came is wrong.
    virtual void on_nonsense(int peer, const std::string& why) = 0;

   protected:
    ~Receiver() = default;
  };

  // `landing` is held while a message's bytes are being stored.
  TlsInlet(TlsStream stream, IoLoop& loop, int peer, Receiver& receiver, std::mutex& landing);
  void on_ready(uint32_t events) override;
  void close();
  bool has_ended() const { return is_closed_; }

 private:
  // How many bytes were read, and 0 when there are none at the moment.
  size_t read_some();
  size_t read_head();
  size_t read_body();
  size_t checked(ptrdiff_t n);

  TlsStream stream_;
  IoLoop& loop_;
  const int peer_;
  Receiver& receiver_;
  std::mutex& landing_;
  bool is_closed_ = false;

  std::array<std::byte, kFrameBytes> head_;
  size_t head_done_ = 0;
  Frame frame_;
  MessagePtr message_;  // while its body is being read
  size_t body_done_ = 0;
  uint32_t checksum_ = 0;  // of what was read of the body
};

}  // namespace chorale::transport
