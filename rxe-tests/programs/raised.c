/* SPDX-License-Identifier: MIT */
/*
 * Programs that have more rights than whoever runs them: a set-user-ID, a
 * set-group-ID one and one with a file capability, copies of this one, are run
 * by a user who names files, folders and libraries in the environment. Of these
 * none may be read, written or loaded by the provider.
 *
 * The provider is in libibverbs's configuration, as an installed one: so this
 * is for a mount namespace in which that is empty.
 */
#include "common.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#define NOBODY 65534

static char stage[64], own[80], program[80], said[1 << 20];

/* What such a program does, and what it has mapped then. */
static int subject(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_device_attr attr;
	struct ibv_context *ctx;
	char line[4096];
	FILE *maps;
	Dl_info info;

	printf("raised: %lu\n", getauxval(AT_SECURE));
	for (int i = 0; list && list[i]; i++) {
		ctx = ibv_open_device(list[i]);
		if (!ctx || ibv_query_device(ctx, &attr) ||
		    !dladdr((void *)ctx->ops.poll_cq, &info)) {
			printf("not opened: %s\n", ibv_get_device_name(list[i]));
			continue;
		}
		printf("opened: %s by %s\n", ibv_get_device_name(list[i]),
		       info.dli_fname);
	}
	maps = fopen("/proc/self/maps", "r");
	while (maps && fgets(line, sizeof(line), maps))
		fputs(line, stdout);
	return 0;
}

static void write_file(const char *path, const char *text, mode_t mode)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
	ssize_t left = strlen(text);

	CHECK(fd >= 0);
	EQ(write(fd, text, left), left);
	OK(fchmod(fd, mode));
	close(fd);
}

static void copy_file(const char *source, const char *path)
{
	int from = open(source, O_RDONLY | O_CLOEXEC);
	int to = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0755);
	char bytes[65536];
	ssize_t got;

	CHECK(from >= 0 && to >= 0);
	while ((got = read(from, bytes, sizeof(bytes))) > 0)
		EQ(write(to, bytes, got), got);
	EQ(got, 0);
	OK(fchmod(to, 0755));
	close(from);
	close(to);
}

static bool there(const char *name)
{
	char path[160];

	snprintf(path, sizeof(path), "%s/%s", own, name);
	return !access(path, F_OK);
}

/* Runs the program as nobody. `all`: with what libibverbs heeds as well where
 * only a group or a capability is raised; what it does then is its own. */
static void run(bool all)
{
	static const char *const names[] = {
		"RINGVERBS_LOG_FILE=%s/log", "VERBS_LOG_FILE=%s/verbs-log",
		"RINGVERBS_DEVICE=embedded:%s/wire", "SYSFS_PATH=%s/sys",
		"RDMAV_DRIVERS=%s/theirs", "IBV_DRIVERS=%s/theirs",
	};
	static char text[ARRAY_SIZE(names)][160];
	char *env[ARRAY_SIZE(names) + 4] = {
		"RINGVERBS_LOG=debug", "VERBS_LOG_LEVEL=4",
		"RINGVERBS_DEVICES=mlx5,rxe",
	};
	int ends[2], status, count = 3;
	size_t have = 0;
	ssize_t got;
	pid_t child;

	for (size_t i = 0; i < (all ? ARRAY_SIZE(names) : 3); i++) {
		snprintf(text[i], sizeof(text[i]), names[i], own);
		env[count++] = text[i];
	}
	OK(pipe(ends));
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		dup2(ends[1], 1);
		dup2(ends[1], 2);
		close(ends[0]);
		close(ends[1]);
		if (setgroups(0, NULL) || setgid(NOBODY) || setuid(NOBODY))
			_exit(3);
		execle(program, program, "subject", NULL, env);
		_exit(4);
	}
	close(ends[1]);
	while ((got = read(ends[0], said + have, sizeof(said) - 1 - have)) > 0)
		have += got;
	said[have] = 0;
	close(ends[0]);
	EQ(waitpid(child, &status, 0), child);
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		FAIL("status %#x: %s", status, said);
}

#define SAID(text)                                                             \
	do {                                                                   \
		if (!strstr(said, text))                                       \
			FAIL("does not say `%s`: %s", text, said);             \
	} while (0)
#define NOT_SAID(text)                                                         \
	do {                                                                   \
		if (strstr(said, text))                                        \
			FAIL("says `%s`: %s", text, said);                     \
	} while (0)

static void check_raised(const char *kind, bool all)
{
	char path[160];
	FILE *log;

	run(all);
	printf("%s\n", kind);
	SAID("raised: 1\n");
	SAID("opened: ");
	SAID("libringverbs");
	NOT_SAID("not opened");
	NOT_SAID("ringverbs INFO");
	NOT_SAID("ringverbs DEBUG");
	CHECK(!there("log") && !there("wire"));
	/* Nothing of theirs is mapped. */
	snprintf(path, sizeof(path), "%s/", own);
	NOT_SAID(path);
	/* This file libibverbs itself opens, whatever its rights. */
	snprintf(path, sizeof(path), "%s/verbs-log", own);
	log = fopen(path, "r");
	while (log && fgets(said, sizeof(said), log))
		NOT_SAID("ringverbs");
	if (log)
		fclose(log);
	unlink(path);
}

int main(int argc, char **argv)
{
	struct vfs_cap_data cap = {
		.magic_etc = VFS_CAP_REVISION_2 | VFS_CAP_FLAGS_EFFECTIVE,
		.data[0].permitted = 1 << CAP_NET_RAW,
	};
	const char *plugin = getenv("RDMAV_DRIVERS");
	struct ibv_device **list;
	char text[300], path[160];

	if (argc > 1 && !strcmp(argv[1], "subject"))
		return subject();
	if (geteuid())
		SKIP("only root makes programs of raised rights");
	CHECK(plugin && *plugin == '/');
	/* So that whoever looks sees who serves. */
	list = ibv_get_device_list(NULL);
	CHECK(list && list[0] && ibv_open_device(list[0]));
	snprintf(text, sizeof(text), "driver %s\n", plugin);
	write_file("/etc/libibverbs.d/raised.driver", text, 0644);

	snprintf(stage, sizeof(stage), "/tmp/raised.%d", getpid());
	snprintf(own, sizeof(own), "%s/own", stage);
	snprintf(program, sizeof(program), "%s/program", stage);
	OK(mkdir(stage, 0755));
	OK(mkdir(own, 0777));
	OK(chown(own, NOBODY, NOBODY));
	/* A library that would be loaded. */
	snprintf(text, sizeof(text), "%s-rdmav34.so", plugin);
	snprintf(path, sizeof(path), "%s/theirs.so", own);
	copy_file(text, path);
	for (int pabi = 34; pabi < 70; pabi++) {
		snprintf(path, sizeof(path), "%s/theirs-rdmav%d.so", own, pabi);
		OK(symlink("theirs.so", path));
	}
	copy_file("/proc/self/exe", program);

	/* So that what follows can fail. */
	run(false);
	SAID("raised: 0\n");
	SAID("opened: ");
	CHECK(there("log"));
	snprintf(path, sizeof(path), "%s/log", own);
	OK(unlink(path));
	snprintf(path, sizeof(path), "%s/verbs-log", own);
	unlink(path);

	OK(chmod(program, 04755));
	check_raised("set-user-ID", true);
	OK(chmod(program, 02755));
	check_raised("set-group-ID", false);
	OK(chmod(program, 0755));
	if (setxattr(program, "security.capability", &cap, XATTR_CAPS_SZ_2, 0)) {
		printf("no file capabilities here: %s\n", strerror(errno));
		return 0;
	}
	check_raised("file capability", false);
	return 0;
}
