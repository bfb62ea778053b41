//! Names, values and help of the counters, as `platen device stat` and Prometheus show them.

use super::{Accelerated, BackingStatus, BdStat, DictionaryStatus, IoStat, MmStat, Own, Status};

impl BackingStatus {
    /// As [`MmStat::fields`].
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 7] {
        [
            ("bd_direct", self.direct.into(), "1 if I/O bypasses the page cache", false),
            ("bd_blocks", self.bd_blocks, "Blocks of 4 KiB of the backing device", false),
            ("bd_free", self.bd_free, "Free blocks of the backing device", false),
            (
                "bd_doubtful",
                self.bd_doubtful,
                "Blocks out of use because a killed server may still be writing them",
                false,
            ),
            ("bd_written_today", self.bd_written_today, "Blocks written since midnight UTC", false),
            (
                "bd_failed_reads",
                self.bd_failed_reads,
                "Reads from the backing device that failed or returned wrong bytes",
                true,
            ),
            (
                "bd_failed_writes",
                self.bd_failed_writes,
                "Writes to the backing device that failed",
                true,
            ),
        ]
    }
}

impl DictionaryStatus {
    /// As [`MmStat::fields`].
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 7] {
        [
            ("dictionaries", self.dictionaries, "Dictionaries in the store", false),
            (
                "dictionary_places",
                self.dictionary_places,
                "Dictionaries that the store still has room for",
                false,
            ),
            (
                "dictionary_size",
                self.dictionary_size,
                "Size of the dictionary in use, bytes",
                false,
            ),
            (
                "dictionary_gain",
                self.dictionary_gain,
                "Bytes that it saved on pages held out from training, in 1/10000",
                false,
            ),
            (
                "dictionary_pages",
                self.dictionary_pages,
                "Pages whose compressed form needs a dictionary",
                false,
            ),
            (
                "dictionary_tables",
                self.dictionary_tables,
                "Memory for the dictionaries' tables, bytes",
                false,
            ),
            (
                "dictionaries_lost",
                self.dictionaries_lost,
                "Dictionaries that were found damaged",
                false,
            ),
        ]
    }
}

impl Status {
    /// Conditions, as [`MmStat::fields`]: 1 if true.
    pub(crate) fn flags(&self) -> Vec<(&'static str, u64, &'static str)> {
        let mut flags = vec![(
            "damage",
            self.platen.damage.is_some().into(),
            "1 if a page could not be read as it was written",
        )];
        if let Some(backing) = &self.backing {
            let (stopped, refused) = (backing.stopped.is_some(), backing.refused.is_some());
            flags.extend([
                ("writeback_stopped", stopped.into(), "1 if writeback has stopped"),
                (
                    "backing_refused",
                    refused.into(),
                    "1 if the server could not take the backing device over",
                ),
            ]);
        }
        if let Some(pressure) = &self.pressure {
            let known = pressure != "none";
            flags.push((
                "pressure_known",
                known.into(),
                "0 if the kernel reports no memory pressure",
            ));
        }
        flags
    }
}

impl Accelerated {
    /// As [`MmStat::fields`], without the reasons.
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 12] {
        [
            ("threads", self.threads, "Threads with a QAT instance each", false),
            ("on_device", self.on_device, "Threads whose instance accepts pages now", false),
            ("offloaded", self.offloaded, "Pages that the QAT device compressed", true),
            (
                "redone",
                self.redone,
                "Pages given to the device and then compressed in software",
                true,
            ),
            ("in_flight", self.in_flight, "Pages at the device now", false),
            ("retries", self.retries, "Times that the device's queue was full", true),
            ("deadlines", self.deadlines, "Pages that the device did not complete in time", true),
            ("late", self.late, "Completions after the page was compressed in software", true),
            ("suspicions", self.suspicions, "Times that an instance was suspended", true),
            ("recoveries", self.recoveries, "Times that a suspended instance was used again", true),
            ("verified", self.verified, "Outputs that were decompressed and compared", true),
            (
                "longest_wait_us",
                self.longest_wait_us,
                "Longest time of a page at the device, microseconds",
                false,
            ),
        ]
    }
}

impl MmStat {
    /// Name, value, help text, and whether the value only grows.
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 9] {
        [
            (
                "orig_data_size",
                self.orig_data_size,
                "Size of the stored pages, uncompressed, bytes",
                false,
            ),
            (
                "compr_data_size",
                self.compr_data_size,
                "Size of the stored pages, compressed, bytes",
                false,
            ),
            ("mem_used_total", self.mem_used_total, "Memory in use, tables included, bytes", false),
            (
                "mem_limit",
                self.mem_limit,
                "Limit of memory (--mem-limit; with --swap 7/8 of all memory), bytes; 0 is no limit",
                false,
            ),
            ("mem_used_max", self.mem_used_max, "Largest memory that was in use, bytes", false),
            (
                "same_pages",
                self.same_pages,
                "Pages that consist of one repeated 8-byte value",
                false,
            ),
            (
                "pages_compacted",
                self.pages_compacted,
                "Pages of memory that compaction freed",
                true,
            ),
            ("huge_pages", self.huge_pages, "Pages stored uncompressed", false),
            (
                "huge_pages_since",
                self.huge_pages_since,
                "Pages stored uncompressed since this server started",
                true,
            ),
        ]
    }
}

impl IoStat {
    /// As [`MmStat::fields`].
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 4] {
        [
            ("failed_reads", self.failed_reads, "Pages that could not be read", true),
            ("failed_writes", self.failed_writes, "Pages that could not be written", true),
            ("invalid_io", self.invalid_io, "Invalid requests", true),
            ("notify_free", self.notify_free, "Pages that clients discarded", true),
        ]
    }
}

impl BdStat {
    /// As [`MmStat::fields`].
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 3] {
        [
            ("bd_count", self.bd_count, "Pages on the backing device", false),
            ("bd_reads", self.bd_reads, "Blocks of 4 KiB read from the backing device", true),
            ("bd_writes", self.bd_writes, "Blocks of 4 KiB written to the backing device", true),
        ]
    }
}

impl Own {
    /// As [`MmStat::fields`].
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 9] {
        [
            ("pages_read", self.pages_read, "Pages read", true),
            ("pages_written", self.pages_written, "Pages written", true),
            ("requests", self.requests, "Requests of clients", true),
            ("split_requests", self.split_requests, "Requests that several threads shared", true),
            (
                "mem_ready",
                self.mem_ready,
                "Memory that is allocated ahead of writes, part of mem_used_total, bytes",
                false,
            ),
            (
                "grouped_pages",
                self.grouped_pages,
                "Pages compressed together with their neighbours",
                false,
            ),
            ("groups", self.groups, "Groups of pages compressed together", false),
            ("lost_pages", self.lost_pages, "Pages that a new server found damaged", false),
            (
                "generation",
                self.generation,
                "Servers that the store has had, this one included",
                false,
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Serialize;

    /// Fields of zram's files in `/sys/block/zramN`, in their order
    /// (Documentation/admin-guide/blockdev/zram.rst).
    const MM_STAT: [&str; 9] = [
        "orig_data_size",
        "compr_data_size",
        "mem_used_total",
        "mem_limit",
        "mem_used_max",
        "same_pages",
        "pages_compacted",
        "huge_pages",
        "huge_pages_since",
    ];
    const IO_STAT: [&str; 4] = ["failed_reads", "failed_writes", "invalid_io", "notify_free"];
    const BD_STAT: [&str; 3] = ["bd_count", "bd_reads", "bd_writes"];

    /// The keys of a JSON object of numbers in their order, and the numbers.
    fn written(value: &impl Serialize) -> (Vec<String>, Vec<u64>) {
        let text = serde_json::to_string(value).unwrap();
        let pairs = text.trim_matches(['{', '}']).split(',');
        pairs
            .map(|pair| pair.split_once(':').unwrap())
            .map(|(key, number)| (key.trim_matches('"').to_owned(), number.parse::<u64>().unwrap()))
            .unzip()
    }

    /// The table and Prometheus show the fields of the JSON status, under zram's names in zram's
    /// order.
    fn compare<const N: usize>(
        zrams: [&str; N],
        value: &impl Serialize,
        fields: [(&'static str, u64, &'static str, bool); N],
    ) {
        let (keys, numbers) = written(value);
        assert_eq!(keys, zrams);
        assert_eq!(fields.map(|field| field.0), zrams);
        assert_eq!(fields.map(|field| field.1)[..], numbers);
    }

    #[test]
    fn counters_have_zram_s_names_in_zram_s_order() {
        let mm = MmStat {
            orig_data_size: 1,
            compr_data_size: 2,
            mem_used_total: 3,
            mem_limit: 4,
            mem_used_max: 5,
            same_pages: 6,
            pages_compacted: 7,
            huge_pages: 8,
            huge_pages_since: 9,
        };
        compare(MM_STAT, &mm, mm.fields());
        let io = IoStat { failed_reads: 1, failed_writes: 2, invalid_io: 3, notify_free: 4 };
        compare(IO_STAT, &io, io.fields());
        let bd = BdStat { bd_count: 1, bd_reads: 2, bd_writes: 3 };
        compare(BD_STAT, &bd, bd.fields());
    }
}
