/* The protocol of a group in shared memory (transport/shm/group_segment.h), to be checked exhaustively:
 *
 *   spin -DN=2 -search docs/dev/shm.pml
 *   spin -DN=3 -DCALLS=1 -search docs/dev/shm.pml                three ranks, one of which may die: 1.1 million states
 *   spin -DN=3 -DCALLS=2 -search -bitstate docs/dev/shm.pml      too many states for a complete search; not in CI
 *   spin -DFENCE -search docs/dev/shm.pml        the second part
 *
 * Ranks run CALLS calls. Odd calls carry their data in the slot; in even ones peers read the tensor itself. A rank may die
 * at any moment (at most DEATHS do). While nobody dies, a rank sleeps without a limit of time, so a lost wake-up is a
 * deadlock that spin reports; a death ends the sleep of others, as the bounded sleep of the program does.
 * Steps are sequentially consistent, as the flags of the program are.
 *
 * Claims: nobody reads a slot or a tensor that its owner has overwritten (asserts); nobody waits for ever (no invalid end
 * state); a rank fails only if somebody died; and, in the second part, nothing is written into memory that a rank has taken
 * back after a failure.
 */
#ifndef N
#define N 2
#endif
#ifndef CALLS
#define CALLS 4
#endif
#ifndef DEATHS
#define DEATHS 1
#endif

#define SLOT(rank, call) ((rank) * 2 + (call) % 2)
#define OUTSIDE(call) ((call) % 2 == 0)

byte number[N * 2], payload[N * 2]; /* the slots: published last, and the data */
byte tensor[N];                     /* what a rank's caller holds: the number of the call it belongs to */
byte acted[N];
byte sleepers, bell[N];
bool sleeping[N], dead[N];
byte deaths;

/* Note [Doorbells]: after everything that is published. */
inline ring() {
  if
  :: sleepers > 0 ->
     r = 0;
     do
     :: r < N -> if :: sleeping[r] -> bell[r]++ :: else fi; r++
     :: else -> break
     od
  :: else
  fi
}

/* A dead peer fails the wait only if its flag, read once more after the notice of death, is still behind. */
inline wait_for(flag) {
  do
  :: flag -> break
  :: !(flag) && dead[p] -> if :: flag -> break :: else -> goto failed fi
  :: else ->
     seen = bell[me];
     sleeping[me] = true;
     sleepers++;
     if
     :: flag || dead[p]
     :: else -> (bell[me] != seen || dead[p])
     fi;
     sleepers--;
     sleeping[me] = false
  od
}

inline perhaps_die() {
  if
  :: deaths < DEATHS -> deaths++; dead[me] = true; goto gone
  :: skip
  fi
}

proctype Rank(byte me) {
  byte call = 1, p, r, seen;
  do
  :: call > CALLS -> break
  :: else ->
     tensor[me] = call;
     payload[SLOT(me, call)] = call;
     perhaps_die();
     number[SLOT(me, call)] = call;
     perhaps_die();
     ring();
     p = 0;
     do
     :: p < N -> wait_for(number[SLOT(p, call)] == call); p++
     :: else -> break
     od;
     /* Everybody has entered: read what they gave. */
     p = 0;
     do
     :: p < N ->
        if
        :: OUTSIDE(call) -> assert(tensor[p] == call)
        :: else -> assert(number[SLOT(p, call)] == call && payload[SLOT(p, call)] == call)
        fi;
        p++
     :: else -> break
     od;
     if
     :: OUTSIDE(call) ->
        perhaps_die();
        acted[me] = call;
        ring();
        p = 0;
        do
        :: p < N -> wait_for(acted[p] >= call); p++
        :: else -> break
        od
     :: else
     fi;
     tensor[me] = 0; /* the caller has its tensor back */
     call++
  od;
  goto gone;
failed:
  assert(deaths > 0);
gone:
  skip
}

/* Note [Hands]: one rank acts on the other's tensor while the other gives up. `mapped` is the copy of the pages that the
 * actor reaches; after a fence the owner looks at another. */
bool failure, hands, owner_has_it_back;
byte owner_sees; /* 0: the pages that the actor mapped, 1: fresh ones */

proctype Actor() {
  byte chunk = 0;
  hands = true;
  do
  :: failure || chunk == 3 -> break
  :: else ->
     /* A write into the pages that were mapped; the actor may be stopped before it for any time. */
     assert(!(owner_has_it_back && owner_sees == 0));
     chunk++
  od;
  hands = false
}

proctype Owner() {
  failure = true;
  if
  :: !hands             /* lowered, or never raised: a rank that raises them later sees the failure */
  :: hands -> owner_sees = 1 /* patience is over: fresh pages */
  fi;
  owner_has_it_back = true
}

init {
#ifdef FENCE
  run Actor();
  run Owner()
#else
  byte i = 0;
  atomic {
    do
    :: i < N -> run Rank(i); i++
    :: else -> break
    od
  }
#endif
}
