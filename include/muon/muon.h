#pragma once

/// The whole public API.
#include <muon/algorithm.h>
#include <muon/groups.h>
#include <muon/matrix.h>
#include <muon/optimizer.h>
#include <muon/orthogonalize.h>
#include <muon/qk_clip.h>
#include <muon/schedule.h>
#include <muon/state_file.h>
#include <muon/step.h>
#include <muon/version.h>
