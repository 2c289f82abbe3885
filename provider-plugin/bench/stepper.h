/* SPDX-License-Identifier: MIT */
/*
 * Exact counts by single-stepping.
 *
 * The measured code runs in a child process between two int3 instructions
 * (STEP_MARK). Its parent steps it with PTRACE_SINGLESTEP from the first to the
 * second and looks at each instruction: how many, how many of them are locked
 * (a lock prefix, or xchg with memory) and how many are fences (lfence, mfence,
 * sfence). Instructions of one library can be left out by its name (the
 * stand-in's: what is behind the doorbell is not the provider's).
 *
 * Nothing here depends on time, so the counts are the same in every run on the
 * same binaries. A rep string instruction counts once.
 */
#ifndef RINGVERBS_BENCH_STEPPER_H
#define RINGVERBS_BENCH_STEPPER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define STEP_MARK() __asm__ volatile("int3" ::: "memory")

struct step_counts {
	uint64_t instructions;
	uint64_t locked;
	uint64_t fences;
};

/*
 * Counts the child's next marked stretch. False when the child ended before
 * the stretch did. With `trace`, each counted instruction's module and offset
 * is printed.
 */
bool step_count(pid_t child, const char *left_out, bool trace,
		struct step_counts *out);

#endif
