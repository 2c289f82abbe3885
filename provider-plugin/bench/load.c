/* SPDX-License-Identifier: MIT */
/*
 * What loading a provider takes, in a process that has libibverbs:
 *
 *   load PROVIDER.so
 *
 * Output, one fact a line:
 *   provider PATH
 *   time load NS
 *   time load-resident BYTES
 */
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static double now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static double resident(void)
{
	FILE *file = fopen("/proc/self/statm", "r");
	long all, resident;

	if (!file || fscanf(file, "%ld %ld", &all, &resident) != 2)
		return 0;
	fclose(file);
	return (double)resident * sysconf(_SC_PAGESIZE);
}

int main(int argc, char **argv)
{
	double before, start, end;

	if (argc != 2) {
		fprintf(stderr, "usage: load PROVIDER.so\n");
		return 1;
	}
	if (!dlopen("libibverbs.so.1", RTLD_NOW)) {
		fprintf(stderr, "load: %s\n", dlerror());
		return 1;
	}
	/* What asking takes itself is there before. */
	now_ns();
	resident();
	before = resident();
	start = now_ns();
	if (!dlopen(argv[1], RTLD_NOW)) {
		fprintf(stderr, "load: %s\n", dlerror());
		return 1;
	}
	end = now_ns();
	printf("provider %s\n", argv[1]);
	printf("time load %.0f\n", end - start);
	printf("time load-resident %.0f\n", resident() - before);
	return 0;
}
