/* Two decisions of a job that loses ranks (elastic.md), for spin.

   Who is in the next epoch. N nodes decide, of which node 0 has the store. A node may die and a partition may come, move
   and heal between any two messages; a reply may be lost. spin checks that no two nodes go on with different memberships,
   that a membership is backed by more than half of the nodes, or by half of them with the store's, and that nobody waits
   for ever.
     spin -DN=3 -DPROPOSERS=2 -DCUTS=1 -search elastic.pml
     spin -DN=4 -DPROPOSERS=2 -DDEATHS=0 -DCUTS=1 -DLOSSES=0 -search elastic.pml

   Whether a step is applied (-DCOMMIT): N ranks of one node come to the commit point and die there, or while they agree
   what to do; a launcher states epochs. spin checks that survivors end with the same number of updates.
     spin -DCOMMIT -DN=3 -DDEATHS=2 -search elastic.pml */
#ifndef N
#define N 3
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef CUTS
#define CUTS 2 /* changes of the partition */
#endif
#ifndef LOSSES
#define LOSSES 1 /* replies that do not come */
#endif
#ifndef PROPOSERS
#define PROPOSERS N
#endif
#define BIT(i) (1 << (i))

bool dead[4];
byte deaths = DEATHS;

#ifndef COMMIT
/* ---- who is in the next epoch: a vote with ballots. A ballot belongs to one node, which uses it once. */

bool far[4];           /* the side of the partition */
byte cuts = CUTS, losses = LOSSES;
byte promised[4];      /* as a voter: the highest ballot it answered */
byte ballot_of[4];     /* and the last that it voted for; 0: none */
byte value_of[4];      /* the membership that it voted for */
byte decided[4];       /* 0: not yet */
bool ended[4];         /* says how to resume, and touches nothing any more */

#define REACHES(i, j) (!dead[j] && !ended[j] && far[i] == far[j])
#define BITS(m) (((m) & 1) + (((m) >> 1) & 1) + (((m) >> 2) & 1) + (((m) >> 3) & 1))
#define QUORUM(m) (2 * BITS(m) > N || (2 * BITS(m) == N && ((m) & 1)))

#define HEARS(j) (!dead[i] && !ended[i] && !decided[i] && decided[j] && REACHES(i, j))

inline decide(i, v) {
  decided[i] = v;
  assert(QUORUM(v));
  k = 0;
  do
  :: k < N ->
     assert(decided[k] == 0 || decided[k] == v);
     k++
  :: else -> break
  od;
  if
  :: v & BIT(i)
  :: else -> ended[i] = 1; decided[i] = 0 /* excluded: its ranks are killed */
  fi
}

inline hear(j) {
  atomic {
    if
    :: HEARS(j) -> decide(i, decided[j])
    :: else -> if :: !decided[i] -> ended[i] = 1 :: else fi
    fi
  }
}

/* asks node j for its promise; a reply may be lost */
inline ask(j) {
  atomic {
    if
    :: REACHES(i, j) && promised[j] < i + 1 ->
       promised[j] = i + 1;
       if
       :: seen = seen | BIT(j);
          if
          :: ballot_of[j] > best -> best = ballot_of[j]; value = value_of[j]
          :: else
          fi
       :: j != i && losses > 0 -> losses--
       fi
    :: else
    fi
  }
}

inline propose(j) {
  atomic {
    if
    :: REACHES(i, j) && promised[j] <= i + 1 ->
       promised[j] = i + 1;
       ballot_of[j] = i + 1;
       value_of[j] = value;
       if
       :: votes = votes | BIT(j)
       :: j != i && losses > 0 -> losses--
       fi
    :: else
    fi
  }
}

#define EACH(what)                                 \
  if :: dead[i] -> goto end :: else -> what(0) fi; \
  if :: dead[i] -> goto end :: else -> what(1) fi; \
  if :: dead[i] || N < 3 :: else -> what(2) fi;    \
  if :: dead[i] || N < 4 :: else -> what(3) fi

proctype Node(byte i) {
  byte k, seen, best, value, votes;
  if
  :: i < PROPOSERS -> /* its verdict on a peer is in */
     EACH(ask);
     if
     :: atomic {
          !dead[i] && QUORUM(seen) ->
          /* what others have voted for, or those that answered */
          if
          :: best == 0 -> value = seen
          :: else
          fi
        };
        EACH(propose);
        atomic {
          if
          :: !dead[i] && QUORUM(votes) -> decide(i, value)
          :: else
          fi
        }
     :: else
     fi
  :: true
  fi;
  d_step { seen = 0; best = 0; value = 0; votes = 0 };
  /* hears of a decision, or has waited long enough for one */
  if
  :: dead[i] || ended[i] || decided[i]
  :: HEARS(0) -> hear(0)
  :: HEARS(1) -> hear(1)
  :: HEARS(2) -> hear(2)
  :: HEARS(3) -> hear(3)
  :: atomic { !decided[i] -> ended[i] = 1 }
  fi;
end:
  skip
}

#define STRIKE(what)      \
  if                      \
  :: what(0)              \
  :: what(1)              \
  :: N > 2 -> what(2)     \
  :: N > 3 -> what(3)     \
  fi
#define KILL(j) dead[j] = 1
#define MOVE(j) far[j] = !far[j]

active proctype Fate() {
  do
  :: atomic { deaths > 0 -> deaths--; STRIKE(KILL) }
  :: atomic { cuts > 0 -> cuts--; STRIKE(MOVE) }
  :: break
  od
}

init {
  byte i;
  atomic {
    i = 0;
    do
    :: i < N -> run Node(i); i++
    :: else -> break
    od
  }
}

#else
/* ---- whether a step is applied */

byte epoch = 1, members = BIT(N) - 1;
bool entered[N], applied[N];
byte reported_in[N];  /* the epoch of the report */
bool report[N];       /* this rank has applied the step */
byte settled_in[N];   /* the epoch in which it knows what to do */
bool out[N];
bool complete;        /* all that are left have done the same: what dies now dies in the next step */

#define ALIVE (BIT(N) - 1 - (dead[0] + 2 * dead[1] + 4 * dead[2]))

/* every member of epoch e satisfies it */
#define HAS(what, i, e) (!(members & BIT(i)) || what[i] == e)
#define ALL(what, e) (HAS(what, 0, e) && HAS(what, 1, e) && HAS(what, 2, e))
#define SAYS(i) ((members & BIT(i)) && report[i])

proctype Rank(byte i) {
  byte e;
  if
  :: entered[i] = 1;
     if
     :: entered[0] && entered[1] && entered[2] ->
        if
        :: !dead[i] -> applied[i] = 1 /* passed */
        :: else
        fi
     :: ALIVE != BIT(N) - 1 /* the call failed, also where a dead rank had come */
     fi
  :: ALIVE != BIT(N) - 1 /* a call before the commit point failed */
  fi;
again:
  /* The next collective call, or this one, fails where a rank is dead. */
  if
  :: dead[i] -> goto end
  :: epoch > e && epoch > 1 -> e = epoch
  :: atomic { applied[0] && applied[1] && applied[2] -> complete = 1; goto end }
  :: complete -> goto end
  fi;
  atomic { reported_in[i] = e; report[i] = applied[i] };
  if
  :: dead[i] -> goto end
  :: complete -> goto end
  :: epoch > e -> goto again
  :: atomic {
       epoch == e && ALL(reported_in, e) ->
       if
       :: !dead[i] && !applied[i] && (SAYS(0) || SAYS(1) || SAYS(2)) ->
          assert(entered[i]); /* its gradients are whole */
          applied[i] = 1
       :: else
       fi;
       settled_in[i] = e
     }
  fi;
  if
  :: dead[i] -> goto end
  :: complete -> goto end
  :: epoch > e -> goto again
  :: atomic { epoch == e && ALL(settled_in, e) -> complete = 1 }
  fi;
end:
  out[i] = 1
}

active proctype Launcher() {
  do
  :: atomic { (members & ALIVE) != members -> members = members & ALIVE; epoch++ }
  :: out[0] && out[1] && out[2] && (members & ALIVE) == members -> break
  od;
  /* Those that went on have done the same. A death behind the end is a death of the next step. */
  assert(!(members & 1) || !(members & 2) || applied[0] == applied[1]);
  assert(!(members & 1) || !(members & 4) || applied[0] == applied[2]);
  assert(!(members & 2) || !(members & 4) || applied[1] == applied[2])
}

active proctype Fate() {
  do
  :: atomic { deaths > 0 -> deaths--; if :: dead[0] = 1 :: dead[1] = 1 :: dead[2] = 1 fi }
  :: break
  od
}

init {
  atomic { run Rank(0); run Rank(1); run Rank(2) }
}
#endif
