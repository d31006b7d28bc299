package outfitter.flink;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;

/**
 * The settings of one resource: {@code external-resource.<name>.param.*}.
 *
 * <ul>
 *   <li>{@code resource}: the resource's name in Outfitter. Flink does not tell a driver its own name.
 *   <li>{@code bus}, {@code host}, {@code cluster}, {@code config}, {@code worker}, {@code priority}, {@code lease},
 *       {@code label}: the options of {@code outfitter hold} of the same name. {@code label} takes several, with
 *       commas.
 *   <li>{@code wait}: seconds that the task manager's start waits for busy devices (default 60).
 *   <li>{@code wait-for-manager}: {@code true} waits as long for a manager as well.
 *   <li>{@code command}: the program, with arguments (default {@code outfitter}).
 *   <li>{@code on-failure}: {@code exit} (default) ends the task manager if it has no devices, or loses them;
 *       {@code continue} is Flink's way, a warning.
 * </ul>
 */
final class Settings {

    private static final List<String> PASSED_ON =
            List.of("bus", "host", "cluster", "config", "worker", "priority", "lease");
    private static final Set<String> KEYS = keys();

    final String resource;
    final Duration wait;
    final boolean exits;
    private final List<String> command;
    private final List<String> options;

    private Settings(String resource, Duration wait, boolean exits, List<String> command, List<String> options) {
        this.resource = resource;
        this.wait = wait;
        this.exits = exits;
        this.command = command;
        this.options = options;
    }

    /**
     * @param values the parameters, by key
     * @throws NoDevicesError a key or a value is wrong
     */
    static Settings of(Map<String, String> values) {
        for (String key : values.keySet()) {
            check(KEYS.contains(key), "param." + key + " is unknown; the keys are " + String.join(", ", KEYS));
        }
        String resource = values.getOrDefault("resource", "").trim();
        check(!resource.isEmpty(), "param.resource is missing: the resource's name in Outfitter, such as gpu");
        String onFailure = values.getOrDefault("on-failure", "exit").trim();
        check(List.of("exit", "continue").contains(onFailure), "param.on-failure is neither exit nor continue: " + onFailure);
        List<String> options = new ArrayList<>();
        for (String key : PASSED_ON) {
            String value = values.getOrDefault(key, "").trim();
            if (!value.isEmpty()) {
                options.addAll(List.of("--" + key, value));
            }
        }
        for (String label : values.getOrDefault("label", "").split(",")) {
            if (!label.isBlank()) {
                options.addAll(List.of("--label", label.trim()));
            }
        }
        if (Boolean.parseBoolean(values.getOrDefault("wait-for-manager", "false").trim())) {
            options.add("--wait-for-manager");
        }
        List<String> command = List.of(values.getOrDefault("command", "outfitter").trim().split("\\s+"));
        return new Settings(resource, seconds(values.getOrDefault("wait", "60").trim()), onFailure.equals("exit"), command, options);
    }

    /** The arguments of {@code outfitter hold} for {@code amount} devices of the process {@code owner}. */
    List<String> hold(long amount, long owner, String worker, String incarnation) {
        List<String> arguments = new ArrayList<>(command);
        arguments.add("hold");
        arguments.addAll(options);
        if (!options.contains("--worker")) {
            arguments.addAll(List.of("--worker", worker));
        }
        arguments.addAll(List.of("--resource", resource + "=" + amount, "--owner-pid", Long.toString(owner)));
        arguments.addAll(List.of("--incarnation", incarnation, "--wait", wait.toSeconds() + "s"));
        return arguments;
    }

    private static Duration seconds(String text) {
        String number = text.endsWith("s") ? text.substring(0, text.length() - 1).trim() : text;
        try {
            long seconds = Long.parseLong(number);
            check(seconds >= 0 && seconds <= 86_400, "param.wait is not between 0 and 86400 seconds: " + text);
            return Duration.ofSeconds(seconds);
        } catch (NumberFormatException error) {
            throw new NoDevicesError("param.wait is not a number of seconds: " + text, error);
        }
    }

    private static void check(boolean valid, String problem) {
        if (!valid) {
            throw new NoDevicesError(problem, null);
        }
    }

    private static Set<String> keys() {
        Set<String> keys = new TreeSet<>(PASSED_ON);
        keys.addAll(List.of("resource", "wait", "wait-for-manager", "label", "command", "on-failure"));
        return keys;
    }
}
