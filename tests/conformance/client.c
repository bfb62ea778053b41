/* A user of libqatzip: does what its arguments say, one after the other, and prints a line for each.
 *
 *   init:SW          qzInit, software allowed (1) or not (0)
 *   session:SW       qzSetupSession with the defaults of 1.3.1
 *   script:TEXT      new faults for the simulated device
 *   compress:N:FILE  N bytes, 1 MiB at most for one thread of QATzip; writes FILE and FILE.plain
 *   decompress:FILE  and compares with FILE.plain
 *   counter:N:VALUE  waits until counter number N of the simulated device has VALUE
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <qatzip.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static QzSession_T session;
static int fill;

static double now_ms(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

static void save(const char *name, const char *suffix, const void *data, size_t length)
{
	char path[4096];
	FILE *file;

	snprintf(path, sizeof(path), "%s%s", name, suffix);
	file = fopen(path, "wb");
	if (!file || fwrite(data, 1, length, file) != length || fclose(file))
		exit(3);
}

static unsigned char *load(const char *name, const char *suffix, unsigned int *length)
{
	unsigned char *data = malloc(64 << 20);
	char path[4096];
	FILE *file;

	snprintf(path, sizeof(path), "%s%s", name, suffix);
	file = fopen(path, "rb");
	if (!file || !data)
		exit(3);
	*length = fread(data, 1, 64 << 20, file);
	fclose(file);
	return data;
}

static void compress(const char *argument)
{
	unsigned int length = atoi(argument), consumed = length;
	const char *name = strchr(argument, ':') + 1;
	unsigned int room = length + length / 4 + 65536, produced = room, at;
	unsigned char *plain = malloc(length), *output = malloc(room);
	double start;
	int rc;

	/* Another text each time: what a call leaves behind of the one before is seen. */
	fill++;
	for (at = 0; at < length; at++)
		plain[at] = "abcdefgh"[(at * (at / 37 + fill) / 5) & 7] + (at >> 16 & 15);
	start = now_ms();
	rc = qzCompress(&session, plain, &consumed, output, &produced, 1);
	printf("> compress %d consumed=%d ms=%.0f\n", rc, consumed == length, now_ms() - start);
	save(name, "", output, rc == QZ_OK ? produced : 0);
	save(name, ".plain", plain, length);
	free(plain);
	free(output);
}

static void decompress(const char *name)
{
	unsigned int length, expected;
	unsigned char *input = load(name, "", &length), *plain = load(name, ".plain", &expected);
	unsigned int consumed = length, produced = expected + 65536;
	unsigned char *output = malloc(produced);
	int rc = qzDecompress(&session, input, &consumed, output, &produced);

	printf("> decompress %d equal=%d\n", rc, produced == expected && !memcmp(plain, output, expected));
	free(input);
	free(plain);
	free(output);
}

static int wait_for_counter(const char *argument)
{
	void (*read)(uint64_t *) = (void (*)(uint64_t *))dlsym(RTLD_DEFAULT, "platen_qat_sim_counters");
	uint64_t counters[64], value = atoll(strchr(argument, ':') + 1);
	struct timespec pause = { 0, 5000000L };

	if (!read)
		return 4;
	for (;;) {
		read(counters);
		if (counters[atoi(argument)] >= value)
			return 0;
		nanosleep(&pause, NULL);
	}
}

int main(int count, char **arguments)
{
	int index;

	for (index = 1; index < count; index++) {
		const char *step = arguments[index], *value = strchr(step, ':') + 1;

		if (!strncmp(step, "init:", 5)) {
			printf("> init %d\n", qzInit(&session, atoi(value)));
		} else if (!strncmp(step, "session:", 8)) {
			QzSessionParams_T params;
			int rc;

			qzGetDefaults(&params);
			params.sw_backup = atoi(value);
			rc = qzSetupSession(&session, &params);
			printf("> session %d hw=%ld\n", rc, session.hw_session_stat);
		} else if (!strncmp(step, "script:", 7)) {
			int (*control)(const char *) =
				(int (*)(const char *))dlsym(RTLD_DEFAULT, "platen_qat_sim_control");

			if (!control || control(value))
				return 4;
		} else if (!strncmp(step, "compress:", 9)) {
			compress(value);
		} else if (!strncmp(step, "decompress:", 11)) {
			decompress(value);
		} else if (!strncmp(step, "counter:", 8)) {
			if (wait_for_counter(value))
				return 4;
		} else {
			return 2;
		}
		fflush(stdout);
	}
	qzTeardownSession(&session);
	qzClose(&session);
	return 0;
}
