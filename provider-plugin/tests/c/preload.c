/*
 * Makes a real libibverbs look for devices in $SYSFS_PATH only: no netlink, and
 * character devices that only have to have a name.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>

#define NETLINK 16 /* AF_NETLINK */

int socket(int domain, int type, int protocol)
{
	static int (*real)(int, int, int);

	if (domain == NETLINK) {
		errno = EAFNOSUPPORT;
		return -1;
	}
	if (!real)
		real = (int (*)(int, int, int))dlsym(RTLD_NEXT, "socket");
	return real(domain, type, protocol);
}

/* Not from <sys/stat.h>: both names, whichever libibverbs was built to use. */
#define STAT(name)                                                             \
	int name(const char *path, void *buffer)                               \
	{                                                                      \
		static int (*real)(const char *, void *);                      \
                                                                               \
		if (!strncmp(path, "/dev/infiniband/", 16))                    \
			return 0;                                              \
		if (!real)                                                     \
			real = (int (*)(const char *, void *))dlsym(RTLD_NEXT, #name); \
		return real(path, buffer);                                     \
	}
STAT(stat)
STAT(stat64)
