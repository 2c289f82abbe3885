/* SPDX-License-Identifier: MIT */
/*
 * Programs with elevated privileges (secure-execution mode): copies of this program,
 * with set-user-ID, set-group-ID or a file capability, are run by a user whose
 * environment names files, directories and libraries. The provider must not read,
 * write or load any of them.
 *
 * The program adds the provider to libibverbs's configuration, as for an installed
 * one: it needs a mount namespace in which that is empty.
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

static char directory[64], user_directory[80], program[80], output[1 << 20];

/* Opens all devices, then prints the mappings. */
static int run_elevated(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_device_attr attr;
	struct ibv_context *ctx;
	char line[4096];
	FILE *maps;
	Dl_info info;

	printf("AT_SECURE: %lu\n", getauxval(AT_SECURE));
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
	ssize_t count;

	CHECK(from >= 0 && to >= 0);
	while ((count = read(from, bytes, sizeof(bytes))) > 0)
		EQ(write(to, bytes, count), count);
	EQ(count, 0);
	OK(fchmod(to, 0755));
	close(from);
	close(to);
}

static bool file_exists(const char *name)
{
	char path[160];

	snprintf(path, sizeof(path), "%s/%s", user_directory, name);
	return !access(path, F_OK);
}

/* Runs the program as nobody. `all_variables` includes those that libibverbs uses
 * itself in programs with only a set-group-ID or a capability. */
static void run_as_nobody(bool all_variables)
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
	int ends[2], status, variables = 3;
	size_t length = 0;
	ssize_t count;
	pid_t child;

	for (size_t i = 0; i < (all_variables ? ARRAY_SIZE(names) : 3); i++) {
		snprintf(text[i], sizeof(text[i]), names[i], user_directory);
		env[variables++] = text[i];
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
		execle(program, program, "elevated", NULL, env);
		_exit(4);
	}
	close(ends[1]);
	while ((count = read(ends[0], output + length, sizeof(output) - 1 - length)) > 0)
		length += count;
	output[length] = 0;
	close(ends[0]);
	EQ(waitpid(child, &status, 0), child);
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		FAIL("status %#x: %s", status, output);
}

#define EXPECT_OUTPUT(text)                                                    \
	do {                                                                   \
		if (!strstr(output, text))                                     \
			FAIL("`%s` is not in the output: %s", text, output);   \
	} while (0)
#define EXPECT_NO_OUTPUT(text)                                                 \
	do {                                                                   \
		if (strstr(output, text))                                      \
			FAIL("`%s` is in the output: %s", text, output);       \
	} while (0)

static void check_elevated(const char *kind, bool all_variables)
{
	char path[160];
	FILE *log;

	run_as_nobody(all_variables);
	printf("%s\n", kind);
	EXPECT_OUTPUT("AT_SECURE: 1\n");
	EXPECT_OUTPUT("opened: ");
	EXPECT_OUTPUT("libringverbs");
	EXPECT_NO_OUTPUT("not opened");
	EXPECT_NO_OUTPUT("ringverbs INFO");
	EXPECT_NO_OUTPUT("ringverbs DEBUG");
	CHECK(!file_exists("log") && !file_exists("wire"));
	/* No file of the user is mapped. */
	snprintf(path, sizeof(path), "%s/", user_directory);
	EXPECT_NO_OUTPUT(path);
	/* libibverbs itself opens this file, with any privileges. */
	snprintf(path, sizeof(path), "%s/verbs-log", user_directory);
	log = fopen(path, "r");
	while (log && fgets(output, sizeof(output), log))
		EXPECT_NO_OUTPUT("ringverbs");
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

	if (argc > 1 && !strcmp(argv[1], "elevated"))
		return run_elevated();
	if (geteuid())
		SKIP("only root can create programs with elevated privileges");
	CHECK(plugin && *plugin == '/');
	/* Prints the provider. */
	list = ibv_get_device_list(NULL);
	CHECK(list && list[0] && ibv_open_device(list[0]));
	snprintf(text, sizeof(text), "driver %s\n", plugin);
	write_file("/etc/libibverbs.d/secure-exec.driver", text, 0644);

	snprintf(directory, sizeof(directory), "/tmp/secure-exec.%d", getpid());
	snprintf(user_directory, sizeof(user_directory), "%s/user", directory);
	snprintf(program, sizeof(program), "%s/program", directory);
	OK(mkdir(directory, 0755));
	OK(mkdir(user_directory, 0777));
	OK(chown(user_directory, NOBODY, NOBODY));
	/* The library that RDMAV_DRIVERS names. */
	snprintf(text, sizeof(text), "%s-rdmav34.so", plugin);
	snprintf(path, sizeof(path), "%s/theirs.so", user_directory);
	copy_file(text, path);
	for (int pabi = 34; pabi < 70; pabi++) {
		snprintf(path, sizeof(path), "%s/theirs-rdmav%d.so", user_directory, pabi);
		OK(symlink("theirs.so", path));
	}
	copy_file("/proc/self/exe", program);

	/* Without elevated privileges the variables have an effect. */
	run_as_nobody(false);
	EXPECT_OUTPUT("AT_SECURE: 0\n");
	EXPECT_OUTPUT("opened: ");
	CHECK(file_exists("log"));
	snprintf(path, sizeof(path), "%s/log", user_directory);
	OK(unlink(path));
	snprintf(path, sizeof(path), "%s/verbs-log", user_directory);
	unlink(path);

	OK(chmod(program, 04755));
	check_elevated("set-user-ID", true);
	OK(chmod(program, 02755));
	check_elevated("set-group-ID", false);
	OK(chmod(program, 0755));
	if (setxattr(program, "security.capability", &cap, XATTR_CAPS_SZ_2, 0)) {
		printf("no file capabilities here: %s\n", strerror(errno));
		return 0;
	}
	check_elevated("file capability", false);
	return 0;
}
