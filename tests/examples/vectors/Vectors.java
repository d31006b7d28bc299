import com.fasterxml.jackson.databind.JsonNode;
import java.nio.file.Path;
import org.apache.kafka.common.utils.Utils;

/** Checks examples/java against the vectors in the folder args[0]: prints what differs, and how many there were. */
public final class Vectors {
    static int checked, wrong;

    static void check(String name, Object expected, Object actual) {
        checked++;
        if (expected.equals(actual)) return;
        wrong++;
        System.out.println(name + ": " + actual + " instead of " + expected);
    }

    static JsonNode vectors(String folder, String name) throws Exception {
        return Worker.JSON.readTree(Path.of(folder, name + ".json").toFile());
    }

    /** The word for a row; the example reads the host's partition only. */
    static String status(JsonNode file, JsonNode row) {
        String own = file.path("host").asText() + "/" + file.path("worker").asText() + "/" + file.path("incarnation").asText();
        if (row.path("partition").asInt() != file.path("partition").asInt()) return "skip";
        String text = row.has("text") ? row.path("text").asText() : row.path("value").isNull() ? null : row.path("value").toString();
        return Worker.status(own, row.path("key").asText(), Worker.parse(text));
    }

    public static void main(String[] args) throws Exception {
        JsonNode records = vectors(args[0], "records");
        for (var row : records.path("vectors")) check(row.path("name").asText(), row.path("then").asText(), status(records, row));
        for (var vector : vectors(args[0], "sequences").path("vectors")) {
            if (vector.has("only")) continue; // the example never registers again
            String word = "waiting";
            for (var row : vector.path("records")) {
                String next = status(records, row);
                if (!next.equals("skip") && !word.equals("over") && !word.equals("failed")) word = next;
                check(vector.path("name").asText(), row.path("then").asText(), word);
            }
        }
        for (var vector : vectors(args[0], "leases").path("vectors")) {
            Worker.lease = vector.path("lease_s").asDouble(Double.POSITIVE_INFINITY);
            Worker.aliveAt = vector.path("registered_at").asDouble();
            for (var step : vector.path("steps")) {
                double now = step.path("at").asDouble();
                if (step.has("acknowledged")) Worker.acknowledge(step.path("acknowledged").asDouble(), now);
                check(vector.path("name").asText(), step.path("then").asText().equals("lost"), Worker.isLost(now));
            }
        }
        for (var vector : vectors(args[0], "partitions").path("vectors")) {
            int hash = Utils.murmur2(vector.path("host").asText().getBytes("UTF-8"));
            check(vector.path("host").asText(), vector.path("murmur2").asLong(), Integer.toUnsignedLong(hash));
            check(vector.path("host").asText(), vector.path("partition").asInt(), Utils.toPositive(hash) % vector.path("partitions").asInt());
        }
        System.out.println(checked + " checked, " + wrong + " wrong");
        System.exit(wrong == 0 ? 0 : 1);
    }
}
