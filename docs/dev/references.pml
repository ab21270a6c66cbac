/* The protocol of remote references (Note [References] in src/chorale/rpc/references.h): an owner O, a user A that was
   made by a call, which may pass the reference to B, which may pass it to C. Messages are a set: any that is in flight
   may come next. With TWICE, control messages take effect twice. spin checks that the owner does not let go while a user
   has the reference, or will have it, and that it has let go when all is over.

     spin -search references.pml
     spin -DTWICE -search references.pml */
#ifdef TWICE
#define EFFECT(x) x; x
#else
#define EFFECT(x) x
#endif

/* messages in flight */
bool call, called, to_b, to_c, fork_b, fork_c, known_b, known_c, accept_a, accept_b, end_a, end_b, end_c;
/* users: the reference exists; somebody has a handle; the owner has not confirmed it; it waits for its child */
bool user_a = 1, handle_a = 1, pending_a = 1, holds_a, passed_a;
bool user_b, handle_b, pending_b, holds_b, passed_b;
bool user_c, handle_c, pending_c;
/* the owner: the entry; whether the call that makes its value has come; the forks it knows, and those it has seen end */
bool entry, made, has_a, has_b, has_c, gone_a, gone_b, gone_c;

#define ADD(fork, gone) if :: gone :: else -> entry = 1; fork = 1 fi
#define DROP(fork, gone)                                                        \
  if                                                                            \
  :: fork ->                                                                    \
     fork = 0;                                                                  \
     gone = 1;                                                                  \
     if                                                                         \
     :: has_a || has_b || has_c || !made                                        \
     :: else ->                                                                 \
        assert(!user_a && !user_b && !user_c && !to_b && !to_c); /* too early */ \
        entry = 0; gone_a = 0; gone_b = 0; gone_c = 0                           \
     fi                                                                         \
  :: else                                                                       \
  fi

init {
  call = 1;
  do
  /* A was made by a call of O */
  :: atomic { call -> call = 0; made = 1; ADD(has_a, gone_a); called = 1 }
  :: atomic { called -> called = 0; pending_a = 0 }
  /* handles are passed on and dropped at any time */
  :: atomic { handle_a && !passed_a -> passed_a = 1; holds_a = 1; to_b = 1 }
  :: atomic { handle_b && !passed_b -> passed_b = 1; holds_b = 1; to_c = 1 }
  :: atomic { handle_a -> handle_a = 0 }
  :: atomic { handle_b -> handle_b = 0 }
  :: atomic { handle_c -> handle_c = 0 }
  /* a child asks the owner, and then tells its parent */
  :: atomic { to_b -> to_b = 0; user_b = 1; handle_b = 1; pending_b = 1; fork_b = 1 }
  :: atomic { to_c -> to_c = 0; user_c = 1; handle_c = 1; pending_c = 1; fork_c = 1 }
  :: atomic { fork_b -> fork_b = 0; EFFECT(ADD(has_b, gone_b)); known_b = 1 }
  :: atomic { fork_c -> fork_c = 0; EFFECT(ADD(has_c, gone_c)); known_c = 1 }
  :: atomic { known_b -> known_b = 0; pending_b = 0; accept_a = 1 }
  :: atomic { known_c -> known_c = 0; pending_c = 0; accept_b = 1 }
  :: atomic { accept_a -> accept_a = 0; EFFECT(holds_a = 0) }
  :: atomic { accept_b -> accept_b = 0; EFFECT(holds_b = 0) }
  /* a user ends when nobody has a handle, the owner knows it, and its child is known */
  :: atomic { user_a && !handle_a && !pending_a && !holds_a -> user_a = 0; end_a = 1 }
  :: atomic { user_b && !handle_b && !pending_b && !holds_b -> user_b = 0; end_b = 1 }
  :: atomic { user_c && !handle_c && !pending_c -> user_c = 0; end_c = 1 }
  :: atomic { end_a -> end_a = 0; EFFECT(DROP(has_a, gone_a)) }
  :: atomic { end_b -> end_b = 0; EFFECT(DROP(has_b, gone_b)) }
  :: atomic { end_c -> end_c = 0; EFFECT(DROP(has_c, gone_c)) }
  :: else -> break
  od;
  assert(!entry && !has_a && !has_b && !has_c); /* lost */
  assert(!user_a && !user_b && !user_c && !holds_a && !holds_b)
}
