/*
 * `heir`: a child of fork with a device of its own, as its parent has, ends by _exit(2) and by
 * exit(3) at once. Prints the shortest time for each, in milliseconds.
 */
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>

#include "check.h"

enum { ROUNDS = 5 };

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static void open_device(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);

	CHECK(devices && *devices && ibv_open_device(*devices));
}

static double measure(void (*end)(int))
{
	int fds[2], status;
	double since;

	CHECK(!pipe(fds));
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		open_device();
		since = now();
		CHECK(write(fds[1], &since, sizeof(since)) == sizeof(since));
		end(0);
	}
	CHECK(waitpid(child, &status, 0) == child && !status);
	CHECK(read(fds[0], &since, sizeof(since)) == sizeof(since));
	close(fds[0]);
	close(fds[1]);
	return now() - since;
}

int main(void)
{
	double without = 1e9, with = 1e9;

	open_device();
	for (int round = 0; round < ROUNDS; round++) {
		double took = measure(_exit);
		without = took < without ? took : without;
		took = measure(exit);
		with = took < with ? took : with;
	}
	printf("_exit %.1f exit %.1f\n", without, with);
	return without > 500 || with > 500;
}
