/* SPDX-License-Identifier: MIT */
/*
 * What the stand-ins for the kernel have in common: included by standin.c and
 * mlx5_standin.c. Finding the device and its commands among the process's calls,
 * and the attributes of a command; which commands there are each says itself.
 *
 * The device is opened once and never closed, so its descriptor is not followed
 * through close and dup. RINGVERBS_STANDIN_TRACE=1 prints every command on
 * stderr.
 */
#include <errno.h>
#include <fcntl.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define DEVICE "/dev/infiniband/uverbs0"
#define NETLINK_RDMA_PROTO 20

static int device_fd = -1;
static uint32_t next_handle = 1;
static int trace = -1;

/* ---- of each stand-in ---- */

/* Executes a command. */
static int verbs_ioctl(struct ib_uverbs_ioctl_hdr *hdr);
/* The file that a mapping of the device is of, and where in it. */
static int device_file(off_t *offset);

/* ---- words about it ---- */

static void say(const char *fmt, ...)
{
	va_list args;

	if (trace < 0)
		trace = getenv("RINGVERBS_STANDIN_TRACE") != NULL;
	if (!trace)
		return;
	va_start(args, fmt);
	fputs("standin: ", stderr);
	vfprintf(stderr, fmt, args);
	fputc('\n', stderr);
	va_end(args);
}

static int fail(int error)
{
	errno = error;
	return -1;
}

/* A file in memory, and where it is mapped; NULL if it cannot be made. */
static uint8_t *shared_memory(const char *name, size_t bytes, int *fd)
{
	void *at;

	*fd = memfd_create(name, MFD_CLOEXEC);
	if (*fd < 0 || ftruncate(*fd, bytes))
		return NULL;
	at = (void *)syscall(SYS_mmap, NULL, bytes, PROT_READ | PROT_WRITE,
			     MAP_SHARED | MAP_POPULATE, *fd, 0L);
	return at == MAP_FAILED ? NULL : at;
}

/* ---- attributes ---- */

static struct ib_uverbs_attr *attr_of(struct ib_uverbs_ioctl_hdr *hdr,
				      uint16_t id)
{
	for (unsigned int i = 0; i < hdr->num_attrs; i++)
		if (hdr->attrs[i].attr_id == id)
			return &hdr->attrs[i];
	return NULL;
}

/* Inputs of up to eight bytes are in the attribute itself. */
static uint64_t input_u64(struct ib_uverbs_ioctl_hdr *hdr, uint16_t id)
{
	struct ib_uverbs_attr *attr = attr_of(hdr, id);
	uint64_t value = 0;

	if (!attr)
		return 0;
	if (attr->len && attr->len <= sizeof(value))
		memcpy(&value, &attr->data, attr->len);
	else
		value = attr->data;
	return value;
}

/* Copies what fits and clears the rest, as the kernel does. */
static void output(struct ib_uverbs_ioctl_hdr *hdr, uint16_t id,
		   const void *value, size_t bytes)
{
	struct ib_uverbs_attr *attr = attr_of(hdr, id);
	size_t fits;

	if (!attr || !attr->data)
		return;
	fits = bytes < attr->len ? bytes : attr->len;
	memset((void *)(uintptr_t)attr->data, 0, attr->len);
	memcpy((void *)(uintptr_t)attr->data, value, fits);
	attr->flags |= UVERBS_ATTR_F_VALID_OUTPUT;
}

static void output_u32(struct ib_uverbs_ioctl_hdr *hdr, uint16_t id,
		       uint32_t value)
{
	output(hdr, id, &value, sizeof(value));
}

static void output_handle(struct ib_uverbs_ioctl_hdr *hdr, uint16_t id,
			  int64_t handle)
{
	struct ib_uverbs_attr *attr = attr_of(hdr, id);

	if (attr)
		attr->data_s64 = handle;
}

/* A descriptor for events that never come. */
static int quiet_events(struct ib_uverbs_ioctl_hdr *hdr, uint16_t id)
{
	int fd = eventfd(0, EFD_CLOEXEC);

	if (fd < 0)
		return -1;
	output_handle(hdr, id, fd);
	return 0;
}

/* ---- the interposed calls ---- */

static int open_path(const char *path, int flags, mode_t mode)
{
	if (!strcmp(path, DEVICE)) {
		device_fd = syscall(SYS_openat, AT_FDCWD, "/dev/null",
				    O_RDWR | O_CLOEXEC, 0);
		return device_fd;
	}
	return syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

#define OPEN(name)                                           \
	EXPORT int name(const char *path, int flags, ...)    \
	{                                                    \
		va_list args;                                \
		mode_t mode;                                 \
		va_start(args, flags);                       \
		mode = va_arg(args, mode_t);                 \
		va_end(args);                                \
		return open_path(path, flags, mode);         \
	}
OPEN(open)
OPEN(open64)

EXPORT int openat(int dir, const char *path, int flags, ...)
{
	va_list args;
	mode_t mode;

	va_start(args, flags);
	mode = va_arg(args, mode_t);
	va_end(args);
	if (!strcmp(path, DEVICE))
		return open_path(path, flags, mode);
	return syscall(SYS_openat, dir, path, flags, mode);
}

static const char *real_path(const char *path)
{
	return !strcmp(path, DEVICE) ? "/dev/null" : path;
}

EXPORT int stat(const char *restrict path, struct stat *restrict out)
{
	return fstatat(AT_FDCWD, real_path(path), out, 0);
}

EXPORT int stat64(const char *restrict path, struct stat64 *restrict out)
{
	return fstatat64(AT_FDCWD, real_path(path), out, 0);
}

EXPORT int ioctl(int fd, unsigned long request, ...)
{
	va_list args;
	void *argument;

	va_start(args, request);
	argument = va_arg(args, void *);
	va_end(args);
	if (fd >= 0 && fd == device_fd && request == RDMA_VERBS_IOCTL)
		return verbs_ioctl(argument);
	return syscall(SYS_ioctl, fd, request, argument);
}

EXPORT void *mmap(void *address, size_t bytes, int protection, int flags,
		  int fd, off_t offset)
{
	if (fd >= 0 && fd == device_fd) {
		say("mmap of %zu bytes at %#lx", bytes, (long)offset);
		fd = device_file(&offset);
		flags |= MAP_POPULATE;
	}
	return (void *)syscall(SYS_mmap, address, bytes, protection, flags, fd,
			       offset);
}

EXPORT void *mmap64(void *address, size_t bytes, int protection, int flags,
		    int fd, off64_t offset)
{
	return mmap(address, bytes, protection, flags, fd, offset);
}

EXPORT int socket(int domain, int type, int protocol)
{
	if (domain == AF_NETLINK && protocol == NETLINK_RDMA_PROTO) {
		errno = EPROTONOSUPPORT;
		return -1;
	}
	return syscall(SYS_socket, domain, type, protocol);
}
