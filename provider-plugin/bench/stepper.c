/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE
#include "stepper.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>

#ifndef __x86_64__
#error "The stepper reads x86-64 instructions; other architectures need theirs"
#endif

/* ---- the child's map ---- */

struct module {
	uint64_t start, end;
	char name[200];
};

static struct module modules[512];
static unsigned int nmodules;

static void read_map(pid_t child)
{
	char path[64], line[512];
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/maps", child);
	nmodules = 0;
	file = fopen(path, "r");
	if (!file)
		return;
	while (nmodules < sizeof(modules) / sizeof(modules[0]) &&
	       fgets(line, sizeof(line), file)) {
		struct module *m = &modules[nmodules];

		m->name[0] = 0;
		if (sscanf(line, "%lx-%lx %*s %*s %*s %*s %199s", &m->start,
			   &m->end, m->name) >= 2)
			nmodules++;
	}
	fclose(file);
}

static const struct module *module_at(uint64_t address)
{
	for (unsigned int i = 0; i < nmodules; i++)
		if (address >= modules[i].start && address < modules[i].end)
			return &modules[i];
	return NULL;
}

/* ---- one instruction ---- */

#define INSTRUCTION_BYTES 15

static unsigned int fetch(pid_t child, uint64_t address, uint8_t *code)
{
	struct iovec here = { code, INSTRUCTION_BYTES };
	struct iovec there = { (void *)address, INSTRUCTION_BYTES };
	ssize_t got;

	memset(code, 0, INSTRUCTION_BYTES);
	got = process_vm_readv(child, &here, 1, &there, 1, 0);
	if (got < 0) { /* less than 15 bytes to the end of the mapping */
		there.iov_len = here.iov_len = 4096 - (address & 4095);
		if (there.iov_len > INSTRUCTION_BYTES)
			there.iov_len = here.iov_len = INSTRUCTION_BYTES;
		got = process_vm_readv(child, &here, 1, &there, 1, 0);
	}
	return got < 0 ? 0 : got;
}

struct kind {
	bool locked, fence, repeated, mark;
};

static struct kind decode(const uint8_t *code)
{
	struct kind kind = {};
	bool lock = false;
	unsigned int i;

	for (i = 0; i < INSTRUCTION_BYTES - 3; i++) {
		uint8_t byte = code[i];

		if (byte == 0xf0)
			lock = true;
		else if (byte == 0xf2 || byte == 0xf3)
			kind.repeated = true;
		else if (byte != 0x66 && byte != 0x67 && byte != 0x2e &&
			 byte != 0x36 && byte != 0x3e && byte != 0x26 &&
			 byte != 0x64 && byte != 0x65)
			break;
	}
	if ((code[i] & 0xf0) == 0x40) /* REX */
		i++;
	/* xchg with memory locks without a prefix */
	if ((code[i] == 0x86 || code[i] == 0x87) && code[i + 1] < 0xc0)
		lock = true;
	if (code[i] == 0x0f && code[i + 1] == 0xae &&
	    (code[i + 2] >= 0xe8))
		kind.fence = true;
	kind.locked = lock;
	kind.mark = i == 0 && code[0] == 0xcc;
	/* movs, cmps, stos, lods, scas: the only ones that rep repeats */
	kind.repeated = kind.repeated &&
			((code[i] >= 0xa4 && code[i] <= 0xa7) ||
			 (code[i] >= 0xaa && code[i] <= 0xaf));
	return kind;
}

/* ---- stepping ---- */

static bool stopped_by_trap(pid_t child)
{
	int status;

	return waitpid(child, &status, 0) == child && WIFSTOPPED(status) &&
	       WSTOPSIG(status) == SIGTRAP;
}

/* Where the file of `m` is loaded: its mapping of the lowest address. */
static uint64_t base_of(const struct module *m)
{
	for (unsigned int i = 0; i < nmodules; i++)
		if (!strcmp(modules[i].name, m->name))
			return modules[i].start;
	return m->start;
}

/* The address as objdump has it for a shared object. */
static void print_step(uint64_t address, const struct module *m)
{
	if (m && m->name[0])
		printf("step %#lx %s\n", address - base_of(m), m->name);
	else
		printf("step %#lx ?\n", address);
}

bool step_count(pid_t child, const char *left_out, bool trace,
		struct step_counts *out)
{
	uint64_t before = 0;

	*out = (struct step_counts){};
	/* Run to the first mark; the trap leaves the child after it. */
	if (ptrace(PTRACE_CONT, child, NULL, NULL) || !stopped_by_trap(child))
		return false;
	read_map(child);
	for (;;) {
		struct user_regs_struct regs;
		uint8_t code[INSTRUCTION_BYTES];
		const struct module *m;
		struct kind kind;

		if (ptrace(PTRACE_GETREGS, child, NULL, &regs) ||
		    !fetch(child, regs.rip, code))
			return false;
		kind = decode(code);
		if (kind.mark) {
			/* Step over it by hand: it would trap as itself. */
			regs.rip++;
			return !ptrace(PTRACE_SETREGS, child, NULL, &regs);
		}
		m = module_at(regs.rip);
		if (!(m && left_out && strstr(m->name, left_out)) &&
		    !(kind.repeated && regs.rip == before)) {
			out->instructions++;
			out->locked += kind.locked;
			out->fences += kind.fence;
			if (trace)
				print_step(regs.rip, m);
		}
		before = regs.rip;
		if (ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) ||
		    !stopped_by_trap(child))
			return false;
	}
}
