/* Ends the program, with the line and errno, if a condition does not hold. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CHECK(x)                                                                 \
	do {                                                                     \
		if (!(x)) {                                                      \
			fprintf(stderr, "line %d: %s: %s\n", __LINE__, #x,       \
				strerror(errno));                                \
			_exit(1);                                                \
		}                                                                \
	} while (0)
