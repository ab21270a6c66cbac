// How GPT-2 cuts text into the pieces that its byte-pair encoding then works on, one by one.
#pragma once

#include <cstddef>
#include <string_view>

namespace chorale::text {

// Where the piece that begins at text[at] ends. Precondition: at < text.size(). A piece is the first of these that
// fits:
//   's 't 're 've 'm 'll 'd
//   letters, numbers, or other characters that are no spaces; one space in front belongs to them
//   spaces up to the end of the text, or all but the last one before something else
//   spaces
// Text need not be UTF-8: a byte that is not counts as another character.
size_t end_of_piece(std::string_view text, size_t at);

// Calls f(piece) for each piece, in order; together they are the text.
template <class F>
void for_each_piece(std::string_view text, F&& f) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = end_of_piece(text, at);
    f(text.substr(at, end - at));
    at = end;
  }
}

}  // namespace chorale::text
