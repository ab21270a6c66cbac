/* Two decisions of a job that loses ranks (elastic.md), for spin.

   Who is in the next epoch, and in the one after it. N nodes decide, of which the lowest has the store; those of an epoch decide the next
   (Note [Ballots] in launch/ballots.h). A node may die and a partition may come, move and heal between any two messages; a reply may
   be lost; a node may be behind. spin checks that no two nodes go on with different memberships, that a membership is backed
   by more than half of the nodes of the one before, or by half of them with the store's, and that nobody waits for ever.
     spin -DN=3 -DTRIES=2 -DDEATHS=0 -DCUTS=1 -search elastic.pml
     spin -DN=4 -DTRIES=1 -DDEATHS=0 -DCUTS=1 -search elastic.pml

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
#define CUTS 1 /* changes of the partition */
#endif
#ifndef LOSSES
#define LOSSES 0 /* replies that do not come */
#endif
#ifndef PROPOSERS
#define PROPOSERS 2
#endif
#ifndef TRIES
#define TRIES 1 /* ballots of a node */
#endif
#ifndef DECISIONS
#define DECISIONS 2
#endif
#define BIT(i) (1 << (i))

bool dead[4];
byte deaths = DEATHS;

#ifndef COMMIT
/* ---- who is in the next epochs: a vote with ballots. A ballot belongs to one node, which uses it once. */

bool ended[4]; /* says how to resume, and touches nothing any more */
bool far[4];   /* the side of the partition */
byte cuts = CUTS, losses = LOSSES;
/* A node's vote: the decision it is about, the highest ballot that it has answered, the last that it voted for (0: none), and
   the membership. */
byte about[4], promised[4], ballot_of[4], value_of[4];
/* The last decision that a node knows, and its membership. */
byte known[4], members[4];
byte decided[DECISIONS + 1]; /* whatever anybody decided; nobody reads it but spin */

#define REACHES(i, j) (!dead[j] && !ended[j] && far[i] == far[j])
#define BITS(m) (((m) & 1) + (((m) >> 1) & 1) + (((m) >> 2) & 1) + (((m) >> 3) & 1))
#define LOWEST(m) ((m) & -(m))
/* Enough of the nodes `of`: the lowest has the store. */
#define QUORUM(m, of) (2 * BITS(m) > BITS(of) || (2 * BITS(m) == BITS(of) && ((m) & LOWEST(of))))

inline adopt(number, v) {
  if
  :: v & BIT(i) -> known[i] = number; members[i] = v
  :: else -> ended[i] = 1 /* excluded: its ranks are killed */
  fi
}

inline ask(j) {
  atomic {
    if
    :: (members[i] & BIT(j)) && REACHES(i, j) && (about[j] < number || (about[j] == number && promised[j] < ballot)) ->
       if
       :: about[j] < number -> about[j] = number; ballot_of[j] = 0
       :: else
       fi;
       promised[j] = ballot;
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
    :: (members[i] & BIT(j)) && REACHES(i, j) && (about[j] < number || (about[j] == number && promised[j] <= ballot)) ->
       about[j] = number;
       promised[j] = ballot;
       ballot_of[j] = ballot;
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

/* It hears of a decision, which may not be the next one. */
#define LATER(j) (!dead[i] && !ended[i] && REACHES(i, j) && known[j] > known[i])

proctype Node(byte i) {
  byte tries, number, ballot, seen, best, value, votes;
  do
  :: dead[i] || ended[i] -> break
  :: atomic { /* its verdict on a peer is in */
       !dead[i] && !ended[i] && i < PROPOSERS && tries < TRIES && known[i] < DECISIONS ->
       tries++;
       number = known[i] + 1;
       ballot = tries * 4 + i + 1;
       seen = 0; best = 0; value = 0; votes = 0
     };
     EACH(ask);
     if
     :: atomic {
          !dead[i] && QUORUM(seen, members[i]) ->
          /* what others have voted for, or those that answered */
          if
          :: best == 0 -> value = seen
          :: else
          fi
        };
        EACH(propose);
        atomic {
          if
          :: !dead[i] && QUORUM(votes, members[i]) ->
             assert(decided[number] == 0 || decided[number] == value);
             assert(QUORUM(value, members[i]));
             decided[number] = value;
             adopt(number, value)
          :: else
          fi
        }
     :: true
     fi
  :: atomic { LATER(0) -> adopt(known[0], members[0]) }
  :: atomic { LATER(1) -> adopt(known[1], members[1]) }
  :: atomic { N > 2 && LATER(2) -> adopt(known[2], members[2]) }
  :: atomic { N > 3 && LATER(3) -> adopt(known[3], members[3]) }
  :: atomic { /* has waited long enough */
       !dead[i] && !ended[i] && (tries == TRIES || i >= PROPOSERS || known[i] == DECISIONS) ->
       ended[i] = known[i] < DECISIONS;
       break
     }
  od;
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
    :: i < N -> members[i] = BIT(N) - 1; run Node(i); i++
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
