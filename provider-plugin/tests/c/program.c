/*
 * Loads fake libibverbs libraries the way applications such as NCCL load the
 * real one (dlopen, RTLD_LOCAL), has one of them load the provider, and then
 * works with a device whose kernel is the ioctl() below.
 *
 *   program load PROVIDER LIB [OTHER-LIB]   the first library loads it
 *   program direct PROVIDER LIB [OTHER-LIB] the program itself loads it
 *   program control PROVIDER LIB            also opens a device and makes objects
 *   program layout-mismatch PROVIDER LIB    opening a device must fail cleanly
 *
 * Prints "LIB: N registrations" for each library, exit status 0 unless a step
 * of the control path goes wrong.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(x)                                                               \
	do {                                                                   \
		if (!(x)) {                                                    \
			fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #x, errno); \
			exit(1);                                               \
		}                                                              \
	} while (0)

/* ---- the kernel ---- */

struct attr {
	uint16_t id, len, flags;
	uint8_t elem, reserved;
	uint64_t data;
};
struct header {
	uint16_t length, object, method, num_attrs;
	uint64_t reserved1;
	uint32_t driver_id, reserved2;
	struct attr attrs[];
};

static int fail_next; /* errno of the next command */
static int commands;
static uint32_t last_write_cmd;
static uint32_t last_request[16];

int ioctl(int fd, unsigned long request, ...)
{
	va_list args;
	struct header *h;
	uint32_t handle = 100 + commands;
	unsigned int i;

	va_start(args, request);
	h = va_arg(args, struct header *);
	va_end(args);
	(void)fd;
	if (request != 0xc0181b01) {
		errno = ENOTTY;
		return -1;
	}
	commands++;
	if (fail_next) {
		errno = fail_next;
		fail_next = 0;
		return -1;
	}
	for (i = 0; i < h->num_attrs; i++) {
		struct attr *a = &h->attrs[i];

		if (h->object == 0 && h->method == 0) { /* invoke write */
			if (a->id == 0) /* core in */
				memcpy(last_request,
				       a->len > 8 ? (void *)(uintptr_t)a->data : &a->data,
				       a->len < 64 ? a->len : 64);
			if (a->id == 1 && a->len >= 4) { /* core out */
				uint32_t *out = (uint32_t *)(uintptr_t)a->data;

				out[0] = handle;
				if (a->len >= 12)
					out[1] = 0x1111, out[2] = 0x2222;
				a->flags |= 2;
			}
			if (a->id == 2) /* command */
				last_write_cmd = a->data;
			if (a->id == 0x1001 && a->len >= 4) { /* driver out */
				*(uint32_t *)(uintptr_t)a->data = 77;
				a->flags |= 2;
			}
		} else if (h->object == 0 && h->method == 3) { /* get context */
			if (a->id == 0)
				*(uint32_t *)(uintptr_t)a->data = 6;
			if (a->id == 1)
				*(uint64_t *)(uintptr_t)a->data = 1;
			a->flags |= 2;
		}
	}
	return 0;
}

/* ---- the structures of libibverbs that the program looks at ---- */

struct pd {
	void *context;
	uint32_t handle;
};
struct mr {
	void *context;
	struct pd *pd;
	void *addr;
	size_t length;
	uint32_t handle, lkey, rkey, padding;
	uint32_t mr_type;
	int access;
};
struct mw {
	void *context;
	struct pd *pd;
	uint32_t rkey, handle, type;
};
struct ah {
	void *context;
	struct pd *pd;
	uint32_t handle;
};
struct td {
	void *context;
};
struct parent_attr {
	struct pd *pd;
	struct td *td;
	uint32_t comp_mask;
	void *alloc, *free, *pd_context;
};
struct context {
	void *device;
	void *ops[32];
	int cmd_fd, async_fd, num_comp_vectors;
};
struct device_ops {
	const char *name;
	uint32_t min, max;
	const struct match {
		void *data;
		union {
			const char *modalias;
			uint64_t driver_id;
		};
		uint16_t vendor, device;
		uint8_t kind;
	} *match;
	void *static_providers, *match_device;
	void *(*alloc_context)(void *, int, void *);
	void *(*import_context)(void *, int);
	void *(*alloc_device)(void *);
	void (*uninit_device)(void *);
};

static void *lib;

static void *sym(const char *name)
{
	void *p = dlsym(lib, name);

	CHECK(p);
	return p;
}

#define OP(name, ret, ...) ((ret(*)(__VA_ARGS__))((void *(*)(const char *))sym("fake_op"))(name))

static int open_fd(void)
{
	return open("/dev/null", O_RDWR | O_CLOEXEC);
}

/* Does nothing stay mapped under the address? */
static bool closed(int fd)
{
	return fcntl(fd, F_GETFD) == -1 && errno == EBADF;
}

static void control(void)
{
	const struct device_ops *ops = ((const void *(*)(void))sym("fake_registered"))();
	int (*live)(void) = sym("fake_live_contexts");
	void *(*public)(void *) = sym("fake_public");
	void (*allow)(int) = sym("fake_allow_disassociate");
	struct context *ctx;
	char *device;
	void *vctx;
	int fd;

	CHECK(ops && !strcmp(ops->name, "ringverbs-rxe"));
	CHECK(ops->min == 1 && ops->max == 2);
	CHECK(ops->match[0].kind == 3 && ops->match[0].driver_id == 14);
	CHECK(ops->match[1].kind == 2 && !strcmp(ops->match[1].modalias, "rdma_device:*Nrxe*"));
	CHECK(ops->match[2].kind == 0);

	device = ops->alloc_device(NULL);
	CHECK(device);
	for (int i = 0; i < 712; i++)
		CHECK(!device[i]);

	/* The kernel refuses: nothing stays open, errno says why. */
	fd = open_fd();
	fail_next = EPERM;
	errno = 0;
	CHECK(!ops->alloc_context(device, fd, NULL));
	CHECK(errno == EPERM);
	CHECK(live() == 0 && closed(fd));

	fd = open_fd();
	vctx = ops->alloc_context(device, fd, NULL);
	CHECK(vctx && live() == 1);
	ctx = public(vctx);
	CHECK(ctx->cmd_fd == fd && ctx->async_fd == -1 && ctx->num_comp_vectors == 6);
	CHECK(*(uint64_t *)(device + 704) == 1); /* core_support */

	/* Protection domains. */
	struct pd *pd = OP("alloc_pd", struct pd *, void *)(ctx);
	CHECK(pd && pd->context == ctx && pd->handle >= 100);
	fail_next = ENOMEM;
	errno = 0;
	CHECK(!OP("alloc_pd", struct pd *, void *)(ctx) && errno == ENOMEM);
	fail_next = EBUSY;
	CHECK(OP("dealloc_pd", int, void *)(pd) == EBUSY);

	/* Thread and parent domains keep what they are made of. */
	uint32_t mask = 1;
	errno = 0;
	CHECK(!OP("alloc_td", struct td *, void *, void *)(ctx, &mask) && errno == EINVAL);
	mask = 0;
	struct td *td = OP("alloc_td", struct td *, void *, void *)(ctx, &mask);
	CHECK(td && td->context == ctx);
	struct parent_attr pa = { .td = td };
	errno = 0;
	CHECK(!OP("alloc_parent_domain", struct pd *, void *, void *)(ctx, &pa) && errno == EINVAL);
	pa.pd = pd;
	pa.comp_mask = 1u << 31;
	errno = 0;
	CHECK(!OP("alloc_parent_domain", struct pd *, void *, void *)(ctx, &pa) && errno == EINVAL);
	pa.comp_mask = 3;
	int before = commands;
	struct pd *parent = OP("alloc_parent_domain", struct pd *, void *, void *)(ctx, &pa);
	CHECK(parent && parent->context == ctx && parent->handle == pd->handle);
	CHECK(OP("dealloc_pd", int, void *)(pd) == EBUSY && errno == EBUSY);
	CHECK(OP("dealloc_td", int, void *)(td) == EBUSY);
	CHECK(commands == before); /* the kernel knows nothing of these */

	/* Memory regions. */
	static char memory[4096];
	struct mr *(*reg_mr)(struct pd *, void *, size_t, uint64_t, int) =
		(void *)OP("reg_mr", struct mr *, struct pd *, void *, size_t, uint64_t, int);
	struct mr *mr = reg_mr(parent, memory, sizeof(memory), 0x7000, 1);
	CHECK(mr && mr->context == ctx && mr->pd == parent);
	CHECK(mr->lkey == 0x1111 && mr->rkey == 0x2222 && mr->handle >= 100);
	CHECK(mr->mr_type == 0 && mr->access == 1);
	CHECK(last_write_cmd == 9 && last_request[8] == pd->handle && last_request[9] == 1);
	CHECK(*(uint64_t *)(last_request + 2) == (uintptr_t)memory);
	CHECK(*(uint64_t *)(last_request + 6) == 0x7000);
	CHECK(OP("dealloc_pd", int, void *)(parent) == EBUSY);
	fail_next = EFAULT;
	errno = 0;
	CHECK(!reg_mr(pd, memory, 1, 0, 1) && errno == EFAULT);
	errno = 0; /* all of memory on demand begins at address 0 */
	CHECK(!reg_mr(pd, memory, SIZE_MAX, 0, 1 << 6) && errno == EINVAL);
	uint32_t handle = mr->handle;
	CHECK(OP("rereg_mr", int, void *, int, void *, void *, size_t, int)(mr, 6, pd, NULL, 0, 3) == 0);
	CHECK(mr->handle == handle && mr->access == 3);
	CHECK(last_request[2] == handle && last_request[3] == 6 && last_request[10] == pd->handle);
	fail_next = EINVAL;
	CHECK(OP("dereg_mr", int, void *)(mr) == EINVAL && errno == EINVAL);
	CHECK(OP("dereg_mr", int, void *)(mr) == 0);

	/* Memory windows. */
	struct mw *mw = OP("alloc_mw", struct mw *, void *, uint32_t)(parent, 2);
	CHECK(mw && mw->context == ctx && mw->pd == parent && mw->type == 2 && mw->handle >= 100);
	CHECK(OP("dealloc_pd", int, void *)(parent) == EBUSY);
	fail_next = EBUSY;
	CHECK(OP("dealloc_mw", int, void *)(mw) == EBUSY);
	CHECK(OP("dealloc_mw", int, void *)(mw) == 0);

	/* Address handles: the number is the driver's answer. */
	struct {
		uint8_t dgid[16];
		uint32_t flow_label;
		uint8_t sgid_index, hop_limit, traffic_class;
		uint16_t dlid;
		uint8_t sl, src_path_bits, static_rate, is_global, port_num;
	} __attribute__((aligned(8))) av = { .sgid_index = 1, .hop_limit = 64, .is_global = 1, .port_num = 1 };
	struct ah *ah = OP("create_ah", struct ah *, void *, void *)(pd, &av);
	CHECK(ah && ah->context == ctx && ah->handle >= 100);
	CHECK(((uint32_t *)ah)[6] == 77); /* behind the public part */
	fail_next = EIO;
	CHECK(OP("destroy_ah", int, void *)(ah) == EIO);
	allow(1); /* RDMAV_ALLOW_DISASSOC_DESTROY: gone is as good as destroyed */
	fail_next = EIO;
	CHECK(OP("destroy_ah", int, void *)(ah) == 0);
	allow(0);

	/* A second name for a protection domain. */
	struct pd *imported = OP("import_pd", struct pd *, void *, uint32_t)(ctx, pd->handle);
	CHECK(imported && imported->context == ctx && imported->handle == pd->handle);
	OP("unimport_pd", void, void *)(imported);

	/* Everything goes in the order of its making, reversed. */
	CHECK(OP("dealloc_pd", int, void *)(parent) == 0);
	CHECK(OP("dealloc_td", int, void *)(td) == 0);
	CHECK(OP("dealloc_pd", int, void *)(pd) == 0);

	OP("free_context", void, void *)(ctx);
	CHECK(live() == 0 && closed(fd));
	ops->uninit_device(device);
	puts("control path ok");
}

/* The library is not laid out as its symbols say: noticed before any harm. */
static void layout_mismatch(void)
{
	const struct device_ops *ops = ((const void *(*)(void))sym("fake_registered"))();
	int (*live)(void) = sym("fake_live_contexts");
	char *device = ops->alloc_device(NULL);
	int fd = open_fd();

	CHECK(device);
	errno = 0;
	CHECK(!ops->alloc_context(device, fd, NULL));
	CHECK(errno == EPROTO);
	CHECK(live() == 0 && closed(fd));
	ops->uninit_device(device);
	puts("refused");
}

int main(int argc, char **argv)
{
	void *libs[2] = {};

	CHECK(argc == 4 || argc == 5);
	for (int i = 3; i < argc; i++) {
		libs[i - 3] = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
		if (!libs[i - 3]) {
			fprintf(stderr, "%s\n", dlerror());
			return 1;
		}
	}
	lib = libs[0];
	if (!strcmp(argv[1], "direct")) {
		void *h = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);

		if (!h)
			fprintf(stderr, "%s\n", dlerror());
		CHECK(h);
	} else {
		CHECK(((int (*)(const char *))sym("fake_load"))(argv[2]) == 0);
	}
	for (int i = 3; i < argc; i++) {
		lib = libs[i - 3];
		printf("%s: %d registrations\n", argv[i], ((int (*)(void))sym("fake_registrations"))());
	}
	lib = libs[0];
	if (!strcmp(argv[1], "control"))
		control();
	if (!strcmp(argv[1], "layout-mismatch"))
		layout_mismatch();
	return 0;
}
