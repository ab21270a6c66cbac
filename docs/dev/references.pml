/* The protocol of remote references (Note [References] in src/chorale/rpc/references.h): an owner O, a user A that was
   made by a call, which may pass the reference to B, and with THREE B to C. Messages are a set: any that is in flight
   may come next, however late. spin checks that the owner does not let go while a user has the reference, or will have
   it, and that it has let go when all is over.

   Control messages are asked for and answered. With LOSE a message or its answer may vanish, and is sent again until an
   answer has come; with REPEAT a message that has come may come again, at any time. With GIVE_UP its sender may stop
   asking: then the owner may keep the value (it is reported at the end of the agent), but lets go no earlier.

     spin -search references.pml
     spin -DLOSE -DREPEAT -search references.pml
     spin -DLOSE -DREPEAT -DGIVE_UP -search references.pml
     spin -DTHREE -DLOSE -DGIVE_UP -search references.pml
     spin -DTHREE -DREPEAT -search references.pml

   Three users whose messages are lost and come again: 14 seconds, with -m1000000 as well. */

/* A control message: it is in flight; its sender waits for an answer; its receiver has heard it; the answer is in
   flight. What comes again is answered again, and does nothing (rpc/control_numbers.h). */
#define CONTROL(m) bool m, asks_##m, heard_##m, answer_##m
#define SEND(m) m = 1; asks_##m = 1
#define HEAR(m, effect) if :: heard_##m :: else -> heard_##m = 1; effect fi; answer_##m = 1
#ifdef LOSE
#define LOST(m)                                 \
  :: atomic { m -> m = 0 }                      \
  :: atomic { answer_##m -> answer_##m = 0 }    \
  :: atomic { asks_##m && !m && !answer_##m -> m = 1 }
#else
#define LOST(m)
#endif
#ifdef REPEAT
#define AGAIN(m, effect) :: atomic { m -> HEAR(m, effect) }
#else
#define AGAIN(m, effect)
#endif
#ifdef GIVE_UP
#define GIVEN_UP(m, otherwise) :: atomic { asks_##m && !m && !answer_##m -> asks_##m = 0; otherwise }
#else
#define GIVEN_UP(m, otherwise)
#endif
/* What its receiver does, what its sender does when the answer has come, and when it gives up. */
#define STEPS(m, effect, then, otherwise)       \
  :: atomic { m -> m = 0; HEAR(m, effect) }     \
  :: atomic { answer_##m -> answer_##m = 0; if :: asks_##m -> asks_##m = 0; then :: else fi } \
  AGAIN(m, effect)                              \
  LOST(m)                                       \
  GIVEN_UP(m, otherwise)

/* the call that makes A, its answer, and calls that pass the reference on: these are neither lost nor repeated */
bool call, called, to_b, to_c;
CONTROL(fork_b);
CONTROL(fork_c);
CONTROL(accept_a);
CONTROL(accept_b);
CONTROL(end_a);
CONTROL(end_b);
CONTROL(end_c);
/* users: the reference exists; somebody has a handle; the owner has not confirmed it; it waits for its child, or owes its
   parent the word that it is known until that has come */
bool user_a = 1, handle_a = 1, pending_a = 1, holds_a, passed_a;
bool user_b, handle_b, pending_b, holds_b, passed_b, owes_a;
bool user_c, handle_c, pending_c;
/* the owner: the entry; whether the call that makes its value has come; the forks it knows */
bool entry, made, has_a, has_b, has_c;

#define ADD(fork) entry = 1; fork = 1
#define DROP(fork)                                                              \
  if                                                                            \
  :: fork ->                                                                    \
     fork = 0;                                                                  \
     if                                                                         \
     :: has_a || has_b || has_c || !made                                        \
     :: else ->                                                                 \
        assert(!user_a && !user_b && !user_c && !to_b && !to_c); /* too early */ \
        entry = 0                                                               \
     fi                                                                         \
  :: else                                                                       \
  fi

init {
  call = 1;
  do
  /* A was made by a call of O */
  :: atomic { call -> call = 0; made = 1; ADD(has_a); called = 1 }
  :: atomic { called -> called = 0; pending_a = 0 }
  /* handles are passed on and dropped at any time */
  :: atomic { handle_a && !passed_a -> passed_a = 1; holds_a = 1; to_b = 1 }
  :: atomic { handle_a -> handle_a = 0 }
  :: atomic { handle_b -> handle_b = 0 }
  /* a child asks the owner, and then tells its parent; one that the owner does not answer is of no use, and says so as
     soon as the owner knows its own child, which has no other parent that the owner knows */
  :: atomic { to_b -> to_b = 0; user_b = 1; handle_b = 1; pending_b = 1; SEND(fork_b) }
  STEPS(fork_b, ADD(has_b), pending_b = 0; SEND(accept_a), user_b = 0; handle_b = 0; owes_a = 1)
  :: atomic { owes_a && !holds_b -> owes_a = 0; SEND(accept_a) }
  STEPS(accept_a, holds_a = 0, skip, skip)
  /* a user ends when nobody has a handle, the owner knows it, and its child is known */
  :: atomic { user_a && !handle_a && !pending_a && !holds_a -> user_a = 0; SEND(end_a) }
  :: atomic { user_b && !handle_b && !pending_b && !holds_b -> user_b = 0; SEND(end_b) }
  STEPS(end_a, DROP(has_a), skip, skip)
  STEPS(end_b, DROP(has_b), skip, skip)
#ifdef THREE
  :: atomic { handle_b && !passed_b -> passed_b = 1; holds_b = 1; to_c = 1 }
  :: atomic { handle_c -> handle_c = 0 }
  :: atomic { to_c -> to_c = 0; user_c = 1; handle_c = 1; pending_c = 1; SEND(fork_c) }
  STEPS(fork_c, ADD(has_c), pending_c = 0; SEND(accept_b), user_c = 0; handle_c = 0; SEND(accept_b))
  STEPS(accept_b, holds_b = 0, skip, skip)
  :: atomic { user_c && !handle_c && !pending_c -> user_c = 0; SEND(end_c) }
  STEPS(end_c, DROP(has_c), skip, skip)
#endif
  :: else -> break
  od;
#ifndef GIVE_UP
  assert(!entry && !has_a && !has_b && !has_c); /* lost */
  assert(!user_a && !user_b && !user_c && !holds_a && !holds_b)
#endif
}
