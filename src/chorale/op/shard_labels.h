// Sharding rules as text.
#pragma once

#include "chorale/op/label_letters.h"
