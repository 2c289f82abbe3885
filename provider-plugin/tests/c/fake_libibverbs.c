/*
 * As much of libibverbs as a provider touches, laid out as in one release.
 *
 * Compiled with -DPABI=N -DRELEASE=N -DCONTEXT_OFFSET=bytes
 * -DCOMP_MASK_OFFSET=bytes and a generated "ops.h" that lists the operations in the
 * order of that release; with -DPACKAGE="version" it has a distribution's note.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ops.h" /* op_names[] */

#define N_OPS (sizeof(op_names) / sizeof(op_names[0]))
#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)

struct context { /* ibv_context */
	void *device;
	void *ops[32];
	int cmd_fd;
	int async_fd;
	int num_comp_vectors;
	char mutex[40];
	void *abi_compat;
};
_Static_assert(sizeof(struct context) == 328, "ibv_context");

static const void *registered;
static int registrations;
static const char *names[8];
static void *ops[N_OPS];
static int set_ops_calls;
static int live_contexts;

bool verbs_allow_disassociate_destroy;

#ifdef PACKAGE
#define TEXT "{\"type\":\"deb\",\"name\":\"rdma-core\",\"version\":\"" PACKAGE "\"}"
__attribute__((section(".note.package"), used, aligned(4))) static const struct {
	uint32_t name_size, size, type;
	char name[4];
	char text[(sizeof(TEXT) + 3) / 4 * 4];
} note = { 4, sizeof(note.text), 0xcafe1a7e, "FDO", TEXT };
#endif

void *ibv_qp_to_qp_ex(void *qp)
{
	uint32_t comp_mask;

	memcpy(&comp_mask, (char *)qp + COMP_MASK_OFFSET, sizeof(comp_mask));
	return comp_mask & 2 ? qp : NULL; /* VERBS_QP_EX */
}

void CAT(verbs_register_driver_, PABI)(const void *driver)
{
	registered = driver;
	if (registrations < 8)
		names[registrations] = *(const char *const *)driver;
	registrations++;
}

void *_verbs_init_and_alloc_context(void *device, int cmd_fd, size_t size, void *offset,
				    uint32_t driver_id)
{
	char *memory = calloc(1, size);
	char *vctx = memory + (uintptr_t)offset;
	struct context *ctx = (struct context *)(vctx + CONTEXT_OFFSET);

	if (!memory || driver_id != 14 ||
	    (uintptr_t)offset + CONTEXT_OFFSET + sizeof(*ctx) > size) {
		free(memory);
		close(cmd_fd);
		errno = ENOMEM;
		return NULL;
	}
	ctx->device = device;
	ctx->cmd_fd = cmd_fd;
	ctx->async_fd = -1;
	ctx->abi_compat = (void *)UINTPTR_MAX;
	((size_t *)ctx)[-1] = CONTEXT_OFFSET + sizeof(*ctx);
	live_contexts++;
	return memory;
}

static int op_index(const char *name)
{
	for (unsigned int i = 0; i < N_OPS; i++)
		if (!strcmp(op_names[i], name))
			return i;
	return -1;
}

void verbs_set_ops(void *vctx, void *const *given)
{
	static const struct {
		int at;
		const char *name;
	} copied[] = { { 7, "alloc_mw" },	{ 8, "bind_mw" },	 { 9, "dealloc_mw" },
		       { 11, "poll_cq" },	{ 12, "req_notify_cq" }, { 20, "post_srq_recv" },
		       { 25, "post_send" },	{ 26, "post_recv" } };
	struct context *ctx = (struct context *)((char *)vctx + CONTEXT_OFFSET);

	set_ops_calls++;
	for (unsigned int i = 0; i < N_OPS; i++)
		if (given[i])
			ops[i] = given[i];
	for (unsigned int i = 0; i < sizeof(copied) / sizeof(copied[0]); i++)
		if (given[op_index(copied[i].name)])
			ctx->ops[copied[i].at] = given[op_index(copied[i].name)];
}

void verbs_uninit_context(void *vctx)
{
	struct context *ctx = (struct context *)((char *)vctx + CONTEXT_OFFSET);

	close(ctx->cmd_fd);
	live_contexts--;
}

/* Functions that came with a release. */
#define MARKER(release, name) void name(void) {}
#if RELEASE >= 35
MARKER(35, ibv_import_dm)
#endif
#if RELEASE >= 36
MARKER(36, ibv_query_qp_data_in_order)
#endif
#if RELEASE >= 37
MARKER(37, __verbs_log)
#endif
#if RELEASE >= 49
MARKER(49, ibv_wr_opcode_str)
#endif
#if RELEASE >= 59
MARKER(59, ibv_alloc_dmah)
#endif
#if RELEASE >= 62
MARKER(62, ibv_dm_export_dmabuf_fd)
#endif
#if RELEASE >= 64
MARKER(64, ibv_alloc_buf)
#endif
#if RELEASE >= 65
MARKER(65, ibv_create_comp_cntr)
#endif

/* For the test program. */
int fake_load(const char *provider)
{
	if (!dlopen(provider, RTLD_NOW)) {
		fprintf(stderr, "%s\n", dlerror());
		return -1;
	}
	return 0;
}

const void *fake_registered(void)
{
	return registrations == 1 ? registered : NULL;
}

int fake_registrations(void)
{
	return registrations;
}

const char *fake_name(int i)
{
	return i < registrations && i < 8 ? names[i] : NULL;
}

void *fake_op(const char *name)
{
	int i = op_index(name);

	return i < 0 ? NULL : ops[i];
}

void *fake_public(void *vctx)
{
	return (char *)vctx + CONTEXT_OFFSET;
}

int fake_live_contexts(void)
{
	return live_contexts;
}

void fake_allow_disassociate(int allow)
{
	verbs_allow_disassociate_destroy = allow;
}
