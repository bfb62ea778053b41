//! Names, values and help of the counters, as `platen device stat` and Prometheus show them.

use super::{Accelerated, BackingStatus, BdStat, DictionaryStatus, IoStat, MmStat, Own, Status};
use policy::Field;

/// Lists the counters of a struct: each one's field, in brackets its name if that is another one,
/// whether it is a gauge or a total, which only grows, and its help text.
macro_rules! counters {
    ($of:ident, $number:literal: $($field:ident $([$name:literal])? $kind:ident $help:literal,)*) => {
        impl $of {
            /// The counters in the order in which they are shown.
            pub(crate) fn fields(&self) -> [Field; $number] {
                [$((
                    counters!(@name $field $($name)?),
                    self.$field.into(),
                    $help,
                    counters!(@$kind),
                ),)*]
            }
        }
    };
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $name:literal) => { $name };
    (@gauge) => { false };
    (@total) => { true };
}

counters! { MmStat, 9:
    orig_data_size gauge "Size of the stored pages, uncompressed, bytes",
    compr_data_size gauge "Size of the stored pages, compressed, bytes",
    mem_used_total gauge "Memory in use, tables included, bytes",
    mem_limit gauge
        "Limit of memory (--mem-limit; with --swap 7/8 of all memory), bytes; 0 is no limit",
    mem_used_max gauge "Largest memory that was in use, bytes",
    same_pages gauge "Pages that consist of one repeated 8-byte value",
    pages_compacted total "Pages of memory that compaction freed",
    huge_pages gauge "Pages stored uncompressed",
    huge_pages_since total "Pages stored uncompressed since this server started",
}

counters! { IoStat, 4:
    failed_reads total "Pages that could not be read",
    failed_writes total "Pages that could not be written",
    invalid_io total "Invalid requests",
    notify_free total "Pages that clients discarded",
}

counters! { BdStat, 3:
    bd_count gauge "Pages on the backing device",
    bd_reads total "Blocks of 4 KiB read from the backing device",
    bd_writes total "Blocks of 4 KiB written to the backing device",
}

counters! { Own, 9:
    pages_read total "Pages read",
    pages_written total "Pages written",
    requests total "Requests of clients",
    split_requests total "Requests that several threads shared",
    mem_ready gauge "Memory that is allocated ahead of writes, part of mem_used_total, bytes",
    grouped_pages gauge "Pages compressed together with their neighbours",
    groups gauge "Groups of pages compressed together",
    lost_pages gauge "Pages that a new server found damaged",
    generation gauge "Servers that the store has had, this one included",
}

counters! { BackingStatus, 7:
    direct["bd_direct"] gauge "1 if I/O bypasses the page cache",
    bd_blocks gauge "Blocks of 4 KiB of the backing device",
    bd_free gauge "Free blocks of the backing device",
    bd_doubtful gauge "Blocks out of use because a killed server may still be writing them",
    bd_written_today gauge "Blocks written since midnight UTC",
    bd_failed_reads total "Reads from the backing device that failed or returned wrong bytes",
    bd_failed_writes total "Writes to the backing device that failed",
}

counters! { DictionaryStatus, 7:
    dictionaries gauge "Dictionaries in the store",
    dictionary_places gauge "Dictionaries that the store still has room for",
    dictionary_size gauge "Size of the dictionary in use, bytes",
    dictionary_gain gauge "Bytes that it saved on pages held out from training, in 1/10000",
    dictionary_pages gauge "Pages whose compressed form needs a dictionary",
    dictionary_tables gauge "Memory for the dictionaries' tables, bytes",
    dictionaries_lost gauge "Dictionaries that were found damaged",
}

counters! { Accelerated, 12:
    threads gauge "Threads with a QAT instance each",
    on_device gauge "Threads whose instance accepts pages now",
    offloaded total "Pages that the QAT device compressed",
    redone total "Pages given to the device and then compressed in software",
    in_flight gauge "Pages at the device now",
    retries total "Times that the device's queue was full",
    deadlines total "Pages that the device did not complete in time",
    late total "Completions after the page was compressed in software",
    suspicions total "Times that an instance was suspended",
    recoveries total "Times that a suspended instance was used again",
    verified total "Outputs that were decompressed and compared",
    longest_wait_us gauge "Longest time of a page at the device, microseconds",
}

impl Status {
    /// Conditions: name, 1 if it holds, help text.
    pub(crate) fn flags(&self) -> Vec<(&'static str, u64, &'static str)> {
        let mut flags = vec![
            (
                "damage",
                self.platen.damage.is_some().into(),
                "1 if a page could not be read as it was written",
            ),
            (
                "files_removed",
                (!self.removed.is_empty()).into(),
                "1 if a socket or the lock of the device was removed or replaced",
            ),
        ];
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
    fn compare<const N: usize>(zrams: [&str; N], value: &impl Serialize, fields: [Field; N]) {
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
