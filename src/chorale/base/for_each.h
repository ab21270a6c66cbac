// CHORALE_FOR_EACH(macro, a, b, …) is macro(a) macro(b) …, for up to 80 arguments and also for none.
#pragma once

// The preprocessor expands a macro once per scan and never inside itself; the deferred CHORALE_FOR_EACH_AGAIN takes one
// step per scan, and CHORALE_SCAN scans often enough.
#define CHORALE_SCAN(...) CHORALE_SCAN_3(CHORALE_SCAN_3(CHORALE_SCAN_3(CHORALE_SCAN_3(__VA_ARGS__))))
#define CHORALE_SCAN_3(...) CHORALE_SCAN_2(CHORALE_SCAN_2(CHORALE_SCAN_2(CHORALE_SCAN_2(__VA_ARGS__))))
#define CHORALE_SCAN_2(...) CHORALE_SCAN_1(CHORALE_SCAN_1(CHORALE_SCAN_1(CHORALE_SCAN_1(__VA_ARGS__))))
#define CHORALE_SCAN_1(...) __VA_ARGS__
#define CHORALE_PARENTHESES ()

#define CHORALE_FOR_EACH(macro, ...) __VA_OPT__(CHORALE_SCAN(CHORALE_FOR_EACH_STEP(macro, __VA_ARGS__)))
#define CHORALE_FOR_EACH_STEP(macro, first, ...) \
  macro(first) __VA_OPT__(CHORALE_FOR_EACH_AGAIN CHORALE_PARENTHESES(macro, __VA_ARGS__))
#define CHORALE_FOR_EACH_AGAIN() CHORALE_FOR_EACH_STEP
